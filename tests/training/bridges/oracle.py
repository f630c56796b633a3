"""Run other trainers' own functions on a step in their form, and compare with ``training/trainer/losses.py``.

This is not a test, because the suite installs none of these trainers. In an environment with torch, this package's
dependencies, and verl, AReaL or prime-rl::

    python -m tests.training.bridges.oracle verl areal prime_rl
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch  # type: ignore[import-not-found]

from megaflow_hpc.training.bridges import areal, prime_rl, verl
from megaflow_hpc.training.bridges.rows import TrainerRow, rows
from megaflow_hpc.training.dataflow import Step
from megaflow_hpc.training.trainer.losses import Loss, Tokens, policy_loss
from tests.support.bridges import first_step

CLIP = (0.1, 0.3)


def judged(row: TrainerRow, policy: int) -> Any:
    """Return log-probabilities of a sequence's tokens by a policy close to the engine's; some are outside the clip
    range."""
    draw = np.random.default_rng([policy, *row.rollout.id.encode()])
    return torch.tensor(np.minimum(row.logprobs + 0.25 * draw.standard_normal(len(row.tokens)), 0), dtype=torch.float64)


def ours(step: Step, loss: Loss, proximal: bool = True) -> tuple[float, Any]:
    """Return the loss of the whole step and its gradient by sequence. Without ``proximal`` ratios are new to engine."""
    found = rows(step)
    minibatch = step.minibatch()
    new = torch.cat([judged(row, 1) for row in found]).requires_grad_()
    batch = Tokens(
        offsets=torch.tensor(np.concatenate([[0], np.cumsum([len(row.tokens) for row in found])])),
        mask=torch.from_numpy(np.concatenate([row.mask for row in found])).bool(),
        proximal=torch.cat([judged(row, 0) if proximal else torch.from_numpy(row.logprobs).double() for row in found]),
        engine=torch.from_numpy(np.concatenate([row.logprobs for row in found])).double(),
        advantages=torch.from_numpy(np.concatenate([row.advantages for row in found])).double(),
        weights=torch.from_numpy(np.concatenate([row.weights for row in found])).double(),
        rollout_tokens=torch.tensor([sum(row.rollout.sampled) for row in found]),
    )
    value, _ = policy_loss(loss, new, torch.zeros_like(new), batch, minibatch)
    value.backward()
    assert new.grad.any()
    return value.item(), new.grad.split([len(row.tokens) for row in found])


def compare(name: str, theirs: Any, grads: list[Any], expected: tuple[float, Any]) -> None:
    """Print the difference of two losses and of their gradients."""
    apart = max(float((a - b).abs().max()) for a, b in zip(grads, expected[1], strict=True))
    print(f"{name}: loss {float(theirs):.9f}, ours {expected[0]:.9f}; gradients at most {apart:.1e} apart")
    assert abs(float(theirs) - expected[0]) < 1e-6, name
    assert apart < 1e-6, name


def check_verl(step: Step) -> None:
    """Check the path ``DataProto`` → ``_update_actor`` → ``ppo_loss`` without the model."""
    from verl import DataProto  # type: ignore[import-not-found]
    from verl.utils import tensordict_utils  # type: ignore[import-not-found]
    from verl.workers.config import ActorConfig  # type: ignore[import-not-found]
    from verl.workers.utils.losses import ppo_loss  # type: ignore[import-not-found]
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding  # type: ignore[import-not-found]

    found = rows(step)
    tensors, others = verl.batch(step, multiple=8)
    data = DataProto.from_dict({name: torch.from_numpy(value) for name, value in tensors.items()}, others)
    print(f"verl: DataProto of {len(data)} lines, {sorted(data.batch.keys())}, {sorted(data.non_tensor_batch)}")
    assert sum(len(part) for part in data.chunk(8)) == len(data)
    lines = [*found, *[found[0]] * (len(data) - len(found))]

    def nested(policy: int) -> tuple[Any, list[Any]]:
        """Return log-probabilities as a model gives them: the value at t belongs to token t + 1."""
        leaves = [judged(row, policy).requires_grad_() for row in lines]
        return torch.nested.as_nested_tensor([leaf.roll(-1) for leaf in leaves], layout=torch.jagged), leaves

    batch = left_right_2_no_padding(data.to_tensordict())
    old = no_padding_2_padding(nested(0)[0].detach(), batch)
    batch["old_log_probs"] = old
    for kind, mode in (("ppo", "token-mean"), ("grpo", "seq-mean-token-mean"), ("gspo", "seq-mean-token-mean")):
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=CLIP[0],
            clip_ratio_high=CLIP[1],
            clip_ratio_c=1e6,  # the bound of dual clip, which this package's loss does not have
            loss_agg_mode=mode,
        )
        object.__setattr__(config.policy_loss, "loss_mode", "gspo" if kind == "gspo" else "vanilla")
        by_tokens = int(tensors["response_mask"].sum()) if mode == "token-mean" else None
        by_lines = len(found) if mode != "token-mean" else None
        counts = {"dp_size": 1, "batch_num_tokens": by_tokens, "global_batch_size": by_lines}
        whole = batch.copy()
        tensordict_utils.assign_non_tensor(whole, **counts)
        output, leaves = nested(1)
        loss, _ = ppo_loss(config, {"log_probs": output}, whole)
        loss.backward()
        expected = ours(step, Loss(kind, clip=CLIP, importance="none"))
        compare(f"verl ppo_loss {kind} {mode}", loss.detach(), [leaf.grad for leaf in leaves[: len(found)]], expected)
        assert not any(leaf.grad.any() for leaf in leaves[len(found) :])


def check_areal(step: Step) -> None:
    """Check the concatenation of trajectories and the clipped loss that ``ppo_update`` calls for each micro-batch."""
    from areal.utils.data import concat_padded_tensors  # type: ignore[import-not-found]
    from areal.utils.functional import ppo_actor_loss_fn  # type: ignore[import-not-found]

    found = rows(step)
    groups = [{name: torch.from_numpy(value) for name, value in group.items()} for group in areal.batch(step)]
    data = concat_padded_tensors(groups)
    print(f"areal: {len(found)} lines, {sorted(data)}")
    width = data["input_ids"].shape[1]

    def padded(policy: int) -> tuple[Any, list[Any]]:
        leaves = [judged(row, policy).requires_grad_() for row in found]
        lines = [torch.nn.functional.pad(leaf, (0, width - len(leaf))) for leaf in leaves]
        return torch.stack(lines).roll(-1, 1), leaves

    new, leaves = padded(1)
    loss, _ = ppo_actor_loss_fn(
        logprobs=new,
        proximal_logprobs=padded(0)[0].detach(),
        old_logprobs=data["logprobs"].double(),
        advantages=data["advantages"].double(),
        eps_clip=CLIP[0],
        eps_clip_higher=CLIP[1],
        loss_mask=data["loss_mask"].bool(),
    )
    loss.backward()
    expected = ours(step, Loss("ppo", clip=CLIP, importance="none"))
    compare("areal ppo_actor_loss_fn ppo", loss.detach(), [leaf.grad for leaf in leaves], expected)


def check_areal_actor(step: Step) -> None:
    """Check that ``compute_advantages`` on a workflow's result gives the same alignment."""
    from areal.trainer.ppo.actor import PPOActor  # type: ignore[import-not-found]
    from areal.utils.data import concat_padded_tensors  # type: ignore[import-not-found]

    plain, mine = (
        concat_padded_tensors([{name: torch.from_numpy(value) for name, value in group.items()} for group in groups])
        for groups in (areal.batch(step, aligned=False), areal.batch(step))
    )
    config = SimpleNamespace(overlong_reward_penalty=False, use_decoupled_loss=True, recompute_logprob=True)
    actor: Any = SimpleNamespace(
        config=config,
        reward_bias=0.0,
        reward_scaling=1.0,
        reward_clip=1e9,
        reward_norm=None,
        kl_ctl=0.0,
        kl_estimator=lambda a, b: a - b,
        mask_no_eos_with_zero=False,
        discount=1.0,
        gae_lambda=1.0,
        adv_norm=None,
    )
    theirs = PPOActor._compute_advantages(actor, plain)
    for name in ("loss_mask", "logprobs", "tot_rewards", "kl_rewards", "versions"):
        assert torch.equal(theirs[name], mine[name]), name
    counts = mine["loss_mask"] == 1
    assert torch.equal(theirs["advantages"][counts], mine["rewards"][:, None].expand(counts.shape)[counts])
    print("areal PPOActor._compute_advantages: loss_mask, logprobs, tot_rewards, kl_rewards and versions are ours")


def check_prime_rl(step: Step) -> None:
    """Check that prime-rl's loader reads the files and its loss accepts them."""
    from prime_rl.configs.shared import FileSystemTransportConfig  # type: ignore[import-not-found]
    from prime_rl.configs.trainer import DefaultLossConfig  # type: ignore[import-not-found]
    from prime_rl.trainer.batch import _assert_token_arrays_aligned  # type: ignore[import-not-found]
    from prime_rl.trainer.rl.data import DataLoader  # type: ignore[import-not-found]
    from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn  # type: ignore[import-not-found]
    from prime_rl.transports.rollouts.types import MicroBatch  # type: ignore[import-not-found]

    assert MicroBatch.__struct_fields__ == prime_rl.PrimeMicroBatch.__struct_fields__
    batches = [batch for rank in prime_rl.grid(step, 64, 1, "sample") for batch in rank]
    with tempfile.TemporaryDirectory() as folder:
        prime_rl.hand_over(Path(folder), 1, [batches])
        loader = DataLoader(Path(folder), 1, 1, FileSystemTransportConfig())
        loader.wait_for_batch()
        received = loader.get_batch()
        for received_struct in msgspec.msgpack.decode(
            Path(folder, "rollouts/step_1/rank_0.bin").read_bytes(), type=list[MicroBatch]
        ):
            _assert_token_arrays_aligned(received_struct)
    print(f"prime-rl: its loader read {len(received)} micro-batches")

    by_tokens = {row.tokens.tobytes(): row for row in rows(step)}
    loss_fn = setup_rl_loss_fn(DefaultLossConfig(dppo_mask_low=1.0, dppo_mask_high=1.0, kl_tau=0.0))
    scale = sum(int(batch["loss_mask"].sum()) for batch in received)
    total, grads = torch.zeros(()), {}
    for batch in received:
        lengths = batch["sequence_lengths"]
        sequences = [part.numpy().astype(np.int32).tobytes() for part in batch["input_ids"][0].split(lengths)]
        leaves = [judged(by_tokens[tokens], 1).requires_grad_() for tokens in sequences]
        parts = {
            name: [part.double() if part.is_floating_point() else part for part in batch[name][0].split(lengths)]
            for name in ("inference_logprobs", "advantages", "loss_mask", "rl_weights")
            if batch[name] is not None
        }
        loss, _ = compute_loss(
            leaves,
            parts["inference_logprobs"],
            None,
            parts["advantages"],
            parts["loss_mask"],
            parts.get("rl_weights"),
            None,
            None,
            loss_fn,
            scale,
            1,
            1,
        )
        loss.backward()
        total = total + loss.detach()
        grads |= {tokens: leaf.grad for tokens, leaf in zip(sequences, leaves, strict=True)}
    unbounded = Loss("ppo", clip=(math.inf, math.inf), importance="none")
    in_order = [grads[row.tokens.tobytes()] for row in rows(step)]
    compare("prime-rl compute_loss default", total, in_order, ours(step, unbounded, proximal=False))


def main(names: list[str]) -> None:
    """Run the checks of these projects."""
    with tempfile.TemporaryDirectory() as folder:
        step = first_step(Path(folder) / "run", samples=5)
        step.plan.rollouts[0].weight = 0.5
        checks = {"verl": [check_verl], "areal": [check_areal, check_areal_actor], "prime_rl": [check_prime_rl]}
        for check in [check for name in names for check in checks[name]]:
            check(step)


if __name__ == "__main__":
    main(sys.argv[1:])
