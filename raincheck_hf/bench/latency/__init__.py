"""`raincheck-hf bench latency`: time to first token, time per token, and what they are made of."""

from raincheck_hf.bench.latency.measures import MEASURES
from raincheck_hf.bench.latency.run import run

__all__ = ["MEASURES", "run"]
