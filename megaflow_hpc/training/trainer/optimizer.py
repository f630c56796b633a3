"""AdamW on float32 copies of the trained parameters, with gradient-norm clipping.

Parameters in bfloat16 would lose most updates: at a learning rate of 1e-6, an update is far smaller than half a unit in
the last place of a typical weight. So the optimizer keeps float32 copies, the *masters*, and accumulates gradients in
float32. The model's parameters are rounded from the masters. Parameters that are already float32 are their own masters.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.trainer.model import PolicyModel

MOMENTS = ("exp_avg", "exp_avg_sq")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Options of ``mallopt`` (malloc.h). The first is the size of the free heap above which malloc returns memory to the
kernel. The second is the maximum number of memory-mapped blocks."""


class Optimizer:
    """Runs AdamW on the trained parameters of a policy.

    Args:
        policy: the policy.
        lr, betas, eps, weight_decay: parameters of AdamW.
        clip_norm: maximum norm of the gradient over all parameters and ranks. ``None`` disables clipping.
        offload: keep masters, moments and gradients in host memory, and compute the optimizer step on the CPU.
    """

    def __init__(
        self,
        policy: PolicyModel,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip_norm: float | None = 1.0,
        offload: bool = False,
    ) -> None:
        self.policy = policy
        self.lr = lr
        self.clip_norm = clip_norm
        self._offload = offload
        self._reduced = False
        self.masters: dict[str, Any] = {}
        self._rounded: list[tuple[Any, Any]] = []
        for name, parameter in policy.trained():
            master = parameter
            if parameter.dtype != torch.float32 or offload:
                master = torch.nn.Parameter(
                    parameter.detach().to("cpu" if offload else parameter.device, torch.float32)
                )
                self._rounded.append((parameter, master))
                parameter.register_post_accumulate_grad_hook(_MasterGradient(master))
            self.masters[name] = master
        if not self.masters:
            raise ConfigError("the model has no parameter to train")
        groups: dict[Any, list[Any]] = {}  # in torch's foreach kernels, all tensors need the same mesh
        for master in self.masters.values():
            groups.setdefault(getattr(master, "device_mesh", None), []).append(master)
        # A fused step needs no temporary copies, so it takes 18 bytes per parameter instead of 22.
        self._fused = offload or next(iter(self.masters.values())).device.type == "cuda"
        how = {"fused": True} if self._fused else {"foreach": True}
        parameters = [{"params": group} for group in groups.values()]
        self.adamw = torch.optim.AdamW(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **how)

    def step(self, lr: float | None = None) -> float:
        """Applies and clears the accumulated gradients. Returns their norm before clipping, which is the same on all
        ranks.

        If the norm is not finite, parameters and moments are not changed.
        """
        try:
            self.reduce()
            norm = self._norm()
            if not math.isfinite(norm):
                return norm
            if self.clip_norm is not None:
                torch._foreach_mul_(self._gradients(), min(self.clip_norm / (norm + 1e-6), 1.0))
            for group in self.adamw.param_groups:
                group["lr"] = self.lr if lr is None else lr
            self.adamw.step()
            self.round()
            return norm
        finally:
            self.clear()

    def clear(self) -> None:
        """Discards the accumulated gradients."""
        self._reduced = False
        self.adamw.zero_grad(set_to_none=True)
        self.policy.zero_grad(set_to_none=True)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sums the gradients of adapters over all ranks. FSDP sums the gradients of the parameters that it shards.

        :meth:`step` calls this method. Further calls before the next step do nothing.
        """
        for master in self.masters.values():
            if master.grad is None:  # unused in this step, like an inactive expert; its moments still decay
                master.grad = torch.zeros_like(master)
        if self.policy.adapter and self.policy.ranks.count > 1 and not self._reduced:
            whole = [master.grad for master in self.masters.values()]
            flat = torch.cat([gradient.flatten() for gradient in whole]).to(self.policy.ranks.device)
            dist.all_reduce(flat)
            for gradient, total in zip(whole, flat.split([g.numel() for g in whole]), strict=True):
                gradient.copy_(total.view_as(gradient))
        self._reduced = True

    def _gradients(self) -> list[Any]:
        """Returns this rank's share of each gradient."""
        return [_local(master.grad) for master in self.masters.values()]

    @torch.no_grad()
    def _norm(self) -> float:
        """Returns the norm of the gradient over all ranks. Works if parameters are sharded over different meshes."""
        ranks = self.policy.ranks
        norms = torch.stack(torch._foreach_norm(self._gradients())).to("cpu", torch.float64)
        holders = torch.tensor([ranks.count / _shares(whole) for whole in self.policy.shares(self.masters).values()])
        total = (norms.square() / holders).sum().to(ranks.device)
        if ranks.count > 1:
            dist.all_reduce(total)
        return math.sqrt(float(total)) if math.isfinite(float(total)) else float(total)

    @torch.no_grad()
    def to(self, device: Any) -> None:
        """Moves the policy, masters and moments to a device and discards gradients. Each rank moves its own shard."""
        _keep_memory()
        self.policy.to(device)
        if not self._offload:
            torch.nn.ParameterList(master for _, master in self._rounded).to(device)  # in place
            names = [*MOMENTS, "step"] if self._fused else MOMENTS
            for master in self.masters.values():
                state = self._state(master)
                for name in names:
                    state[name] = state[name].to(device)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.no_grad()
    def round(self) -> None:
        """Sets the model's parameters to their rounded masters."""
        for parameter, master in self._rounded:
            parameter.copy_(master)

    @property
    def updates(self) -> int:
        """Number of optimizer steps taken so far."""
        return int(self._state(next(iter(self.masters.values())))["step"])

    @updates.setter
    def updates(self, count: int) -> None:
        for master in self.masters.values():
            self._state(master)["step"].fill_(count)

    def tensors(self) -> dict[str, Any]:
        """Returns masters and moments by name. The tensors are not copied, so loading a checkpoint into them restores
        the state."""
        kinds = {"master": {name: master.detach() for name, master in self.masters.items()}}
        kinds |= {moment: {n: self._state(m)[moment] for n, m in self.masters.items()} for moment in MOMENTS}
        shares = {kind: self.policy.shares(tensors) for kind, tensors in kinds.items()}
        return {f"{kind}.{name}": shares[kind][name] for name in self.masters for kind in shares}

    def _state(self, master: Any) -> dict[str, Any]:
        """Returns AdamW's state for a master parameter. Before the first step, it creates the same state as AdamW
        would."""
        state: dict[str, Any] = self.adamw.state[master]
        if not state:
            state.update(
                step=torch.tensor(0.0, dtype=torch.float32, device=master.device if self._fused else None),
                exp_avg=torch.zeros_like(master),
                exp_avg_sq=torch.zeros_like(master),
            )
        return state


def _local(tensor: Any) -> Any:
    """Returns this rank's share of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _shares(tensor: Any) -> int:
    """Returns the number of shares into which a tensor is divided."""
    placements = getattr(tensor, "placements", ())
    return math.prod(tensor.device_mesh.size(n) for n, place in enumerate(placements) if not place.is_replicate())


class _MasterGradient:
    """Gradient hook that adds a rounded parameter's gradient to the gradient of its float32 master."""

    def __init__(self, master: Any) -> None:
        self._master = master

    def __call__(self, parameter: Any) -> None:
        gradient = parameter.grad.detach().to(self._master.device, torch.float32)
        parameter.grad = None
        self._master.grad = gradient if self._master.grad is None else self._master.grad + gradient


@cache
def _keep_memory() -> None:
    """Makes malloc keep freed memory for tensors that are moved from GPUs later.

    The kernel has to zero new pages. Moving 4.3 GB from an H200 took 2.7 s with new pages and 0.4 s with reused pages.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
