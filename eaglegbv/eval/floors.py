"""The least time that the machine allows for a phase of a step.

The floor of a forward is the larger of two times: reading all its weights, and the keys and values
it attends to, once at the measured bandwidth; and doing its multiplications at the measured rate.
Time above the floor goes to launches, small kernels and Python. Verification and commit have no
floor here, because they compute little.
"""

from eaglegbv.eval.machine import Machine
from eaglegbv.eval.rig import Rig
from eaglegbv.eval.step_setting import StepSetting


def forward_floor(rig: Rig, setting: StepSetting, machine: Machine) -> float:
    """Return the least seconds of a forward of the target."""
    rows = setting.batch * setting.plan.tree_nodes
    cached = setting.batch * setting.context * rig.target.pool.bytes_per_slot
    read = (target_bytes(rig) + cached) / machine.bandwidth
    return max(read, 2 * rows * _target_weights(rig) / machine.flops)


def draft_floor(rig: Rig, setting: StepSetting, machine: Machine) -> float:
    """Return the least seconds of drafting.

    Every level of a tree reads the head once. The projection of features is left out because it
    is read only once a step.
    """
    if not setting.plan.speculative:
        return 0.0
    weights = sum(p.numel() for name, p in rig.drafter.head.named_parameters() if "fc" not in name)
    size = rig.target.dtype.itemsize
    rows = setting.batch * setting.plan.paths
    level = max(weights * size / machine.bandwidth, 2 * rows * weights / machine.flops)
    return setting.plan.depth * level


def _target_weights(rig: Rig) -> int:
    """Return the number of weights in a forward's products; the embedding is only looked up."""
    every: int = sum(p.numel() for p in rig.target.model.parameters())
    return every - rig.target.input_embeddings.numel()


def target_bytes(rig: Rig) -> int:
    """Return the bytes of the weights that a forward of the target reads."""
    return _target_weights(rig) * rig.target.dtype.itemsize
