"""What was measured, as tables for people."""

from collections.abc import Iterator

from rich.table import Table

from nvme_cache.bench.measure import Figures


def tables(results: Figures) -> Iterator[Table]:
    """A table for each part."""
    plan, model = results["plan"], results["model"]["name"]
    yield _storage(results)
    perplexity = results["windows"]["exact"]["overall"]["perplexity"]
    read = f"{plan['windows']} windows of {plan['window']:,} tokens"
    yield _windows(results, f"{model}, {read}, against the exact cache, whose perplexity is {perplexity:.3f}")
    yield _by_context(results["windows"], "KL divergence by length of context, millinats")
    title = f"{plan['steps']:,} tokens one at a time behind a prompt of {plan['prompt']:,}: KL divergence, millinats"
    yield _by_context(results["stepwise"], title)
    yield _needles(results["needles"])


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _storage(results: Figures) -> Table:
    columns = ["", "bits per element", "exact tokens", "as fed", "key error", "at the end", "value error", "at the end"]
    table = _table(f"One layer's keys and values, {results['plan']['probe']:,} tokens", *columns)
    for name, found in results["storage"].items():
        errors = ("key_error_once", "key_error_at_end", "value_error_once", "value_error_at_end")
        table.add_row(
            name,
            f"{found['quantized_bits_per_element']:.2f}",
            *(f"{found[key]:,.0f}" for key in ("exact_tokens", "exact_tokens_as_fed")),
            *(f"{found[key]:.2%}" for key in errors),
        )
    return table


def _windows(results: Figures, title: str) -> Table:
    columns = ["", "bits per element", "perplexity", "KL millinats", "same top token", "facts found"]
    table = _table(title, *columns)
    for name, found in results["windows"].items():
        overall, facts = found["overall"], results["needles"].get(name)
        change, error = (overall[f"perplexity_change_{key}"] for key in ("percent", "standard_error_percent"))
        table.add_row(
            name,
            f"{found['bits_per_element']:.2f}",
            f"{change:+.2f} ± {error:.2f} %",
            f"{1e3 * overall['kl_divergence_nats']:.2f}",
            f"{overall['top1_agreement_percent']:.1f} %",
            "" if facts is None else f"{facts['found']} of {facts['asked']}",
        )
    return table


def _by_context(caches: Figures, title: str) -> Table:
    spans = next(iter(caches.values()))["by_context"]
    table = _table(title, "", *(f"{span['above_tokens']:,} to {span['to_tokens']:,}" for span in spans))
    for name, found in caches.items():
        table.add_row(name, *(f"{1e3 * span['kl_divergence_nats']:.2f}" for span in found["by_context"]))
    return table


def _needles(caches: Figures) -> Table:
    depths = list(next(iter(caches.values()))["found_by_depth"])
    table = _table("Facts found, by depth in the document", "", *depths, "all")
    for name, found in caches.items():
        table.add_row(name, *(str(found["found_by_depth"][depth]) for depth in depths), f"{found['found']}")
    return table
