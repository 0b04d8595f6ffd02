"""Choice of the requests of each step, of their plans, and of the KV slots they hold."""

from eaglegbv.scheduler.batch import Chunk, Forward, Group, by_plan
from eaglegbv.scheduler.costs import KnownCosts
from eaglegbv.scheduler.kv_slots import KVSlots
from eaglegbv.scheduler.planner import Planner
from eaglegbv.scheduler.prefix_cache import PrefixCache
from eaglegbv.scheduler.scheduler import Scheduler, StepBatch

__all__ = [
    "Chunk",
    "Forward",
    "Group",
    "KVSlots",
    "KnownCosts",
    "Planner",
    "PrefixCache",
    "Scheduler",
    "StepBatch",
    "by_plan",
]
