"""How much is measured: the whole bench, and a quick form that only shows that everything runs."""

from dataclasses import dataclass

from .measure import Rounds

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes, contexts and time.

    Attributes:
        request_bytes: Sizes of a read or write at the drive.
        sample_bytes: Bytes of a sample at the drive.
        fio_s: Seconds fio reads for a sample.
        layer_bytes: Keys and values of one layer, for the fetch path.
        drive: Rounds for each size.
        step_contexts: Tokens for decode steps against the floor.
        step_layers: Layers of the models there.
        steps: Rounds for each context.
        model_layers: Layers of the model of the comparisons below.
        peer_contexts: Tokens for the comparison with other caches.
        peer_steps: Timed steps in a row.
        peers: Rounds for each context.
        prefill_tokens: Length of the prompt.
        prefill: Rounds.
        growth_contexts: Tokens, doubling.
        growth: Rounds for each context.
    """

    request_bytes: tuple[int, ...]
    sample_bytes: int
    fio_s: float
    layer_bytes: tuple[int, ...]
    drive: Rounds
    step_contexts: tuple[int, ...]
    step_layers: int
    steps: Rounds
    model_layers: int
    peer_contexts: tuple[int, ...]
    peer_steps: int
    peers: Rounds
    prefill_tokens: int
    prefill: Rounds
    growth_contexts: tuple[int, ...]
    growth: Rounds


FULL = Plan(
    request_bytes=(256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
    sample_bytes=512 * MIB,
    fio_s=0.4,
    layer_bytes=(4 * MIB, 16 * MIB, 64 * MIB),
    drive=Rounds(budget_s=5, least=2),
    step_contexts=(2048, 4096, 16384, 65536),
    step_layers=8,
    steps=Rounds(budget_s=20, least=2),
    model_layers=30,
    peer_contexts=(8192, 32768),
    peer_steps=1,
    peers=Rounds(budget_s=90, least=5),
    prefill_tokens=8192,
    prefill=Rounds(budget_s=60, least=2, most=5),
    growth_contexts=(2048, 4096, 8192, 16384, 32768),
    growth=Rounds(budget_s=7, least=3, most=7),
)

QUICK = Plan(
    request_bytes=(256 * KIB, 4 * MIB),
    sample_bytes=32 * MIB,
    fio_s=0.1,
    layer_bytes=(4 * MIB,),
    drive=Rounds(budget_s=0, least=1),
    step_contexts=(2048,),
    step_layers=6,
    steps=Rounds(budget_s=0, least=1),
    model_layers=6,
    peer_contexts=(2048,),
    peer_steps=1,
    peers=Rounds(budget_s=0, least=1),
    prefill_tokens=512,
    prefill=Rounds(budget_s=0, least=1),
    growth_contexts=(1024, 2048),
    growth=Rounds(budget_s=0, least=1),
)
