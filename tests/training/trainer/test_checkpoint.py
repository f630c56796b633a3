"""Checkpoints and exported models, on one rank and on two, in the engine's environment."""

from __future__ import annotations

import pytest

from tests.support.torch_ranks import run_ranks

pytestmark = pytest.mark.slow  # all of them wait for one run of torch on two ranks

SCRIPT = r'''
import hashlib, json, resource, shutil, signal, time
from pathlib import Path
import torch, transformers
from launchers.tiny_model import make
from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.rundir.safetensors import read_directory
from megaflow_hpc.training.trainer import checkpoint
from megaflow_hpc.training.trainer.model import ProcessGroup, join, load
from megaflow_hpc.training.trainer.optimizer import Optimizer
from tests.support.trainer_scripts import copies, furthest, refusal, same

LORA = 1
LENGTHS = [7, 12, 1, 9]


def prepare():
    make(Path("tiny"))
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, tie_word_embeddings=True, dtype="bfloat16",
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained("tied")


def start(ranks, base, dtype, lora):
    torch.manual_seed(3)  # LoRA starts at random
    policy = load(base, dtype, ranks, lora=lora)
    return Optimizer(policy, 1e-5)


def train(optimizer, ranks, steps):
    """A batch for each step; each of two ranks sees half of it. Noise comes from the generator, for all alike."""
    for step in steps:
        for part in (0, 1) if ranks.count == 1 else (ranks.rank,):
            lengths = LENGTHS[part::2]
            generator = torch.Generator().manual_seed(10 * step + part)
            tokens = torch.randint(0, 259, (sum(lengths),), generator=generator)
            positions = torch.cat([torch.arange(n) for n in lengths])
            offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
            logprobs, _ = optimizer.policy(tokens, positions, offsets, (positions > 0).nonzero()[:, 0])
            (logprobs * torch.randn(len(tokens), generator=generator)).sum().backward()
        optimizer.step()


CASES = {
    "full": ("tiny", "float32", None), "half": ("tied", "bfloat16", None), "lora": ("tiny", "float32", LORA)
}


def resume(ranks, folder, case):
    """Trains four steps, and the last two of them again from the checkpoint between; returns both ends."""
    optimizer = start(ranks, *CASES[case])
    train(optimizer, ranks, (0, 1))
    saving = checkpoint.save(folder, 2, optimizer, ranks)
    noise = torch.rand(3)
    train(optimizer, ranks, (2, 3))  # while the checkpoint is written
    place = saving.finish()
    ranks.barrier()
    through = copies(optimizer.tensors())
    again, noise_again = go_on(ranks, place, case)
    return through, again, torch.equal(noise, noise_again)


def go_on(ranks, place, case):
    optimizer = start(ranks, *CASES[case])
    assert checkpoint.restore(place, optimizer, ranks) == 2 and optimizer.updates == 2
    noise = torch.rand(3)
    train(optimizer, ranks, (2, 3))
    assert optimizer.updates == 4
    return copies(optimizer.tensors()), noise


def error(call):
    return refusal(call, MegaflowError)


def masters_apart(a, b):
    return furthest(a, {name: tensor for name, tensor in b.items() if name.startswith("master")})


class Late(ProcessGroup):
    def gather(self, value):
        values = super().gather(value)
        time.sleep(0.3 * self.rank)  # the first rank finishes its part before others begin theirs
        return values


def exported(result, case, ranks, optimizer):
    folder = Path(f"export-{case}-{ranks.count}")
    sums = checkpoint.export(folder, optimizer.policy, Late(ranks.rank, ranks.count, ranks.device))
    if ranks.first and ranks.count > 1:
        result[f"shared {case}"] = {
            "files": sorted(p.name for p in folder.iterdir()),
            "sums": {n: s.sha256 == hashlib.sha256((folder / n).read_bytes()).hexdigest() for n, s in sums.items()},
            "sizes": [s.size for s in sums.values()],
        }
    if not ranks.first or ranks.count == 1 and case == "none":
        return
    import peft
    if case == "lora":
        base = transformers.AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.float32)
        read = peft.PeftModel.from_pretrained(base, folder)
        result["adapter"] = sorted(p.name for p in folder.iterdir())
        result["rank"] = json.loads((folder / "adapter_config.json").read_text())["r"]
    else:
        read = transformers.AutoModelForCausalLM.from_pretrained(folder)
        base = Path(CASES[case][0])
        result[f"config {case}"] = (folder / "config.json").read_bytes() == (base / "config.json").read_bytes()
        result[f"files {case}"] = sorted(p.name for p in folder.iterdir())
        if ranks.count == 1:
            result[f"bytes {case}"] = (folder / "model.safetensors").stat().st_size
    result[f"dtype {case}"] = str(next(read.parameters()).dtype)
    return read


def main():
    torch.set_num_threads(1)
    ranks = join()
    if ranks.first:
        prepare()
    ranks.barrier()
    result = {}
    two = {}
    for case in CASES:
        folder = Path(f"two-{case}")
        two[case] = resume(ranks, folder, case)
        optimizer = start(ranks, *CASES[case])
        train(optimizer, ranks, (0, 1))
        exported(result, case, ranks, optimizer)
    alone = ProcessGroup(0, 1, ranks.device)
    if ranks.first:
        for case in CASES:
            one = resume(alone, Path(f"one-{case}"), case)
            result[f"exact {case}"] = [same(*one[:2]), one[2], same(*two[case][:2]), two[case][2]]
            result[f"2 to 1 {case}"] = masters_apart(go_on(alone, Path(f"two-{case}/2"), case)[0], two[case][0])
            result[f"1 and 2 {case}"] = masters_apart(one[0], two[case][0])
            two[f"one {case}"] = one
            optimizer = start(alone, *CASES[case])
            train(optimizer, alone, (0, 1))
            read = exported(result, case, alone, optimizer)
            ours = optimizer.policy.eval()
            tokens = torch.arange(12) * 5
            with torch.no_grad():
                logits = read(input_ids=tokens[None]).logits[0].float()
                wanted = torch.log_softmax(logits[:-1], -1).gather(-1, tokens[1:, None])[:, 0]
                got = ours(tokens, torch.arange(12), [0, 12], torch.arange(1, 12))[0][1:]
            result[f"read {case}"] = float((got - wanted).abs().max())
        for case in CASES:
            result[f"tensors {case}"] = [
                [[n, t.dtype, t.shape] for n, t in sorted(read_directory(Path(f"export-{case}-{k}")).items())]
                for k in (1, 2)
            ]
    ranks.barrier()
    for case in CASES:
        ended = go_on(ranks, Path(f"one-{case}/2"), case)[0]
        if ranks.first:
            result[f"1 to 2 {case}"] = masters_apart(ended, two[f"one {case}"][0])

    if not ranks.first:
        Path("export-blocked").mkdir()
        Path("export-blocked/.rank-1").touch()  # where it would write
    result["blocked rank"] = ranks.gather(
        error(lambda: checkpoint.export(Path("export-blocked"), start(ranks, *CASES["full"]).policy, ranks))
    )
    if not ranks.first:
        return ranks.leave()
    result["files"] = sorted({p.suffix for p in Path("two-full/2").iterdir()}), len(list(Path("two-full/2").iterdir()))
    folder = Path("one-full")
    optimizer = start(alone, *CASES["full"])
    stamp = (folder / "2/about.json").stat().st_mtime_ns
    checkpoint.save(folder, 2, optimizer, alone).finish()
    result["left"] = (folder / "2/about.json").stat().st_mtime_ns == stamp
    for step in (3, 4, 5):
        checkpoint.save(folder, step, optimizer, alone).finish()
    (folder / ".9.77.dead").mkdir()
    (folder / ".9.77.dead/shard-1.safetensors").write_bytes(b"half")
    result["pruned"] = checkpoint.prune(folder, 2, folder / "2"), sorted(p.name for p in folder.iterdir())
    result["other"] = error(lambda: checkpoint.restore(Path("two-half/2"), optimizer, alone))
    (folder / "5/about.json").unlink()
    result["half-written"] = error(lambda: checkpoint.restore(folder / "5", optimizer, alone))
    (shard,) = (folder / "4").glob("*.safetensors")
    with open(shard, "r+b") as file:
        file.truncate(100_000)
    result["damaged"] = error(lambda: checkpoint.restore(folder / "4", optimizer, alone))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))  # as a disk that is full
    result["full disk"] = error(lambda: checkpoint.save(folder, 6, optimizer, alone).finish())
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    result["after it"] = sorted(p.name for p in folder.iterdir())
    ranks.leave()
    print(json.dumps(result))


main()
'''

CASES = ("full", "half", "lora")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("checkpoint"), ranks=2)


def test_a_resumed_training_goes_on_bit_by_bit(found):
    for case in CASES:
        assert found[f"exact {case}"] == [True, True, True, True], case


def test_another_number_of_ranks_goes_on_as_close_as_they_train(found):
    for case in CASES:
        assert found[f"1 to 2 {case}"] <= 1e-6, case
        assert found[f"2 to 1 {case}"] <= 1e-6, case


def test_a_checkpoint_holds_nothing_that_runs_on_being_read(found):
    assert found["files"] == [[".json", ".safetensors"], 3]


def test_a_checkpoint_that_is_there_is_left(found):
    assert found["left"] is True


def test_old_checkpoints_and_those_of_dead_trainers_go_but_never_the_needed_one(found):
    removed, there = found["pruned"]
    assert removed == [3]
    assert there == ["2", "4", "5"]


def test_a_checkpoint_of_another_model_or_half_of_one_is_refused(found):
    assert "belongs to another model" in found["other"]
    assert "the checkpoint is incomplete" in found["half-written"]
    assert "4: is damaged" in found["damaged"]


def test_a_full_disk_leaves_the_checkpoints_that_are_there(found):
    assert "6: the checkpoint cannot be written: [Errno 27] File too large" in found["full disk"]
    assert found["after it"] == ["2", "4", "5"]


def test_an_export_is_read_as_what_was_trained(found):
    for case in CASES:
        assert found[f"read {case}"] <= (0.02 if case == "half" else 1e-5), case
        assert found[f"tensors {case}"][0] == found[f"tensors {case}"][1] != []
    for case, dtype in (("full", "float32"), ("half", "bfloat16")):
        assert found[f"dtype {case}"] == f"torch.{dtype}"
        assert found[f"config {case}"] is True
        assert found[f"files {case}"] == ["config.json", "model.safetensors"]
    assert found["bytes half"] < 60_000  # tied: the head is written once


def test_ranks_write_their_own_files_of_an_export(found):
    for case in ("full", "half"):
        shared = found[f"shared {case}"]
        files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        assert shared["files"] == ["config.json", *files, "model.safetensors.index.json"]
        assert shared["sums"] == dict.fromkeys(files, True)
        assert max(shared["sizes"]) < 0.7 * sum(shared["sizes"])
    assert found["shared lora"]["sums"] == {}
    one, other = found["blocked rank"]
    assert one == other
    assert "export-blocked: the weights cannot be written: rank 1: " in one


def test_an_adapter_is_exported_as_peft_reads_it(found):
    assert found["adapter"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert found["rank"] == 1
