"""Root mean square norm, in few operations."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """PyTorch's norm, at half its price for the few rows of a draft on a CPU.

    There PyTorch composes the norm of operations that cost more to launch than to run. float32
    needs no wider type for the sum, so fewer of them do.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` ``[..., size]`` over the root of its mean square, times the weight."""
        if x.device.type != "cpu" or x.dtype is not torch.float32 or self.eps is None:
            return super().forward(x)
        mean_square = (x * x).sum(dim=-1, keepdim=True) * (1 / x.shape[-1])
        return x * torch.rsqrt(mean_square + self.eps) * self.weight
