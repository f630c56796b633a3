"""AdamW over float32 copies of what is trained, with a clipped norm.

Parameters in bfloat16 would swallow most updates: at a learning rate of 1e-6 an update is far below half a unit in the
last place of a usual weight. So the optimizer keeps masters in float32, which gradients are summed into, and the
model's parameters are their rounding. Parameters in float32 are their own masters.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import torch  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.trainer.model import PolicyModel

MOMENTS = ("exp_avg", "exp_avg_sq")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of malloc.h: bytes at the heap's end that are given back (-1: never); how many blocks have a mapping of their own."""


class Optimizer:
    """AdamW of a policy's trained parameters.

    Args:
        policy: after :meth:`~megaflow_hpc.training.trainer.model.PolicyModel.share`.
        lr, betas, eps, weight_decay: AdamW's.
        clip_norm: largest norm of the whole gradient, over all ranks; ``None`` clips nothing.
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
    ) -> None:
        self.policy = policy
        self.lr = lr
        self.clip_norm = clip_norm
        self.masters: dict[str, Any] = {}
        self._rounded: list[tuple[Any, Any]] = []
        for name, parameter in policy.trained():
            master = parameter
            if parameter.dtype != torch.float32:
                master = torch.nn.Parameter(parameter.detach().float())
                self._rounded.append((parameter, master))
                parameter.register_post_accumulate_grad_hook(_Into(master))
            self.masters[name] = master
        if not self.masters:
            raise ConfigError("the model has no parameter to train")
        self.adamw = torch.optim.AdamW(
            self.masters.values(), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=True
        )

    def step(self, lr: float | None = None) -> float:
        """Applies the gradients that backward passes left, and forgets them; returns their norm before clipping.

        Raises:
            ConfigError: the norm is no number; nothing was changed, and the gradients are forgotten.
        """
        try:
            for master in self.masters.values():
                if master.grad is None:  # nothing went through it, as through an expert; the moments decay all the same
                    master.grad = torch.zeros_like(master)
            gradients = [master.grad for master in self.masters.values()]
            norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            if not math.isfinite(float(norm)):
                raise ConfigError(
                    f"the norm of the gradient is {float(norm)}: no step was taken; look for infinite advantages or "
                    "log-probabilities in the step's plan, lower the learning rate, or compute in float32"
                )
            if self.clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.masters.values(), self.clip_norm, norm, foreach=True)
            for group in self.adamw.param_groups:
                group["lr"] = self.lr if lr is None else lr
            self.adamw.step()
            self.round()
            return float(norm)
        finally:
            self.adamw.zero_grad(set_to_none=True)

    @torch.no_grad()
    def to(self, device: Any) -> None:
        """Moves the policy, masters and moments to a device, of what ranks share each its part; no gradient is left."""
        _keep_memory()
        self.policy.to(device)
        torch.nn.ParameterList(master for _, master in self._rounded).to(device)  # in their places, as a module's are
        for master in self.masters.values():
            self._state(master).update({name: self._state(master)[name].to(device) for name in MOMENTS})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.no_grad()
    def round(self) -> None:
        """Makes the model's parameters the rounding of their masters."""
        for parameter, master in self._rounded:
            parameter.copy_(master)

    @property
    def updates(self) -> int:
        """Steps taken so far."""
        return int(self._state(next(iter(self.masters.values())))["step"])

    @updates.setter
    def updates(self, count: int) -> None:
        for master in self.masters.values():
            self._state(master)["step"].fill_(count)

    def tensors(self) -> dict[str, Any]:
        """Returns masters and moments by name: the tensors themselves, so that what is read into them is the state."""
        found: dict[str, Any] = {}
        for name, master in self.masters.items():
            state = self._state(master)
            found |= {f"master.{name}": master.detach()}
            found |= {f"{moment}.{name}": state[moment] for moment in MOMENTS}
        return found

    def _state(self, master: Any) -> dict[str, Any]:
        """AdamW's state of a parameter, made before its first step as AdamW itself would."""
        state: dict[str, Any] = self.adamw.state[master]
        if not state:
            state.update(
                step=torch.tensor(0.0, dtype=torch.float32),
                exp_avg=torch.zeros_like(master),
                exp_avg_sq=torch.zeros_like(master),
            )
        return state


class _Into:
    """Moves the gradient of a rounded parameter into its master's."""

    def __init__(self, master: Any) -> None:
        self._master = master

    def __call__(self, parameter: Any) -> None:
        gradient = parameter.grad.detach().float()
        parameter.grad = None
        self._master.grad = gradient if self._master.grad is None else self._master.grad + gradient


@cache
def _keep_memory() -> None:
    """Has this process keep memory that it frees, so that tensors that come back from GPUs find what they left there.

    Pages that the kernel gives anew are zeroed first: of 4.3 GB that an H200 sent, 2.7 s, and 0.4 s to memory that was
    kept.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
