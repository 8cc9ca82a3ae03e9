"""What a machine gives to somebody who pages a KV cache there, and what to do about what it lacks.

Facts are gathered by one module each; problems follow from facts alone; showing them is apart.
"""

from .chart import draw_reads
from .findings import Findings, examine
from .report import as_json, as_text

__all__ = ["Findings", "as_json", "as_text", "draw_reads", "examine"]
