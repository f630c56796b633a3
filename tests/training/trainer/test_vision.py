"""Image-text models in the trainer: pixels of stored images, positions, packed rows, and what is refused."""

from __future__ import annotations

import pytest

from tests.support.torch_ranks import run_ranks

pytestmark = pytest.mark.slow  # all of them wait for one run of torch on two ranks

SCRIPT = r'''
import io, json, shutil
from dataclasses import replace
from pathlib import Path
import numpy as np
import torch, transformers
from PIL import Image as Pillow
from launchers.tiny_model import make
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.trainer.model import ProcessGroup, join, load, row_of
from megaflow_hpc.training.trainer.optimizer import Optimizer
from megaflow_hpc.training.trainer.vision import BadImage, Vision, decoded, image_of, vision_parameters
from megaflow_hpc.trajectory import ImageSpan
from tests.support.trainer_scripts import copies, distance, gradients as gradients_of, refusal

PLACEHOLDER, START, END = 259, 260, 261
HALF = 4


def noise(width, height, seed, mode="RGB", kind="PNG"):
    random = np.random.default_rng(seed)
    file = io.BytesIO()
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    pixels = random.integers(0, 256, (height, width, channels), np.uint8)
    Pillow.fromarray(pixels[..., 0] if channels == 1 else pixels, mode).save(file, kind)
    return image_of(file.getvalue(), "test")


def sequence(policy, images, seed, stray=False):
    """A row's part: text and images by turns. With ``stray``, a sampled placeholder that stands for no image."""
    random = np.random.default_rng(seed)
    tokens, shown = random.integers(0, 256, 5).tolist(), []
    for image in images:
        count = policy.vision.tokens_of(image)
        tokens.append(START)
        shown.append((ImageSpan(len(tokens), count, image.sha256), image))
        tokens += [PLACEHOLDER] * count + [END, *random.integers(0, 256, 4).tolist()]
    tokens += [PLACEHOLDER, 7, 8] if stray else []
    return np.array(tokens), np.arange(1, len(tokens)), shown


def row(policy, seed=0):
    a, b, c = noise(84, 56, 1), noise(56, 84, 2), noise(200, 131, 3)
    return [
        sequence(policy, [a], seed),
        sequence(policy, [b, a], seed + 1, stray=True),
        sequence(policy, [], seed + 2),
        sequence(policy, [c, c, b], seed + 3),
    ]


def gradients(policy, rows):
    policy.zero_grad()
    for parts in rows:
        logprobs, entropies = policy(*row_of(parts, policy))
        (logprobs.sum() + 0.3 * entropies.square().sum()).backward()
    return gradients_of(policy)


def own_forward(policy, part):
    """Log-probabilities by transformers' own forward pass, with the model's own positions."""
    tokens, _, shown = part
    kinds = torch.zeros(1, len(tokens), dtype=torch.int32)
    for span, _ in shown:
        kinds[0, span.start : span.end] = 1
    pixels = {}
    if shown:
        made = policy.vision._processor(images=[decoded(image) for _, image in shown], return_tensors="pt")
        pixels = {**made, "mm_token_type_ids": kinds}
    ids = torch.from_numpy(tokens)[None]
    logits = policy.causal(input_ids=ids, use_cache=False, **pixels).logits[0]
    return torch.log_softmax(logits[:-1].float(), -1).gather(-1, ids[0, 1:, None])[:, 0]


def alone(result):
    policy = load("tiny", "float32")
    parts = row(policy)
    with torch.no_grad():
        packed = policy(*row_of(parts, policy))[0]
        each = torch.cat([policy(*row_of([part], policy))[0] for part in parts])
        result["value"] = float((packed - each).abs().max())
        plain = [parts[0], parts[2], parts[3]]
        ours = policy(*row_of(plain, policy))
        where = row_of(plain, policy)[3]
        theirs = torch.cat([own_forward(policy, part) for part in plain])
        result["own"] = float((ours[0][where] - theirs).abs().max())
        other = (*parts[0][:2], [(parts[0][2][0][0], noise(84, 56, 9))])
        changed = policy(*row_of([other], policy))[0] - policy(*row_of(parts[:1], policy))[0]
        result["effect"] = float(changed.abs().max())
    one, several = gradients(policy, [parts]), gradients(policy, [[part] for part in parts])
    result["gradient"] = distance(one, several)
    result["tower"] = sum("visual" in name for name in one)
    again = load("tiny", "float32", recompute=True)
    result["recomputed"] = distance(gradients(again, [parts]), one)
    frozen = load("tiny", "float32", frozen_vision=True, recompute=True)
    names = [name for name, _ in frozen.trained()]
    result["frozen"] = [sum("visual" in n or "projector" in n for n in names), len(names)]
    kept = gradients(frozen, [parts])
    result["language"] = distance(kept, {name: one[name] for name in kept})
    lora = load("tiny", "float32", lora=HALF)
    result["lora"] = [sum("language_model" in n for n, _ in lora.trained()), len(list(lora.trained()))]


def refusals(result):
    policy = load("tiny", "float32")
    tokens, targets, shown = sequence(policy, [noise(84, 56, 1)], 0)
    span, image = shown[0]
    shorter = [(ImageSpan(span.start, span.length - 1, span.image), image)]
    result["length"] = refusal(lambda: row_of([(tokens, targets, shorter)], policy))
    moved = [(ImageSpan(span.start - 1, span.length, span.image), image)]
    result["moved"] = refusal(lambda: row_of([(tokens, targets, moved)], policy))
    touching = np.array([1, START, *[PLACEHOLDER] * 12, END])
    pair = [(ImageSpan(2, 6, span.image), image), (ImageSpan(8, 6, span.image), image)]
    result["touching"] = refusal(lambda: row_of([(touching, targets[:3], pair)], policy))
    bomb = io.BytesIO()
    Pillow.new("1", (100_000, 10_000)).save(bomb, "PNG")
    for name, data in {"damaged": image.data[:200], "bomb": bomb.getvalue(), "text": b"no image"}.items():
        bad = [(span, replace(image, data=data, sha256=name))]
        result[name] = refusal(lambda: row_of([(tokens, targets, bad)], policy), BadImage)
    make(Path("text"))
    result["text only"] = refusal(lambda: row_of([(tokens, targets, shown)], load("text", "float32")))
    result["frozen text"] = refusal(lambda: load("text", "float32", frozen_vision=True))
    shutil.copytree("tiny", "bare")
    Path("bare", "processor_config.json").unlink()
    result["bare"] = refusal(lambda: load("bare", "float32"))
    policy.vision.options = {"size": {"shortest_edge": 784, "longest_edge": 3 * 784}}
    policy.vision._kept.clear()
    result["options"] = policy.vision.tokens_of(noise(200, 131, 3))
    for mode, kind in (("RGBA", "PNG"), ("L", "PNG"), ("RGB", "JPEG"), ("RGB", "WEBP")):
        found = decoded(noise(30, 20, 4, mode, kind))
        result[f"{mode} {kind}"] = [found.mode, *found.size]
    clear = io.BytesIO()
    Pillow.new("RGBA", (2, 2), (10, 20, 30, 0)).save(clear, "PNG")
    result["clear"] = list(decoded(image_of(clear.getvalue(), "test")).getpixel((0, 0)))
    keyed = io.BytesIO()
    Pillow.new("RGB", (2, 2), (10, 20, 30)).save(keyed, "PNG", transparency=(10, 20, 30))
    result["keyed"] = list(decoded(image_of(keyed.getvalue(), "test")).getpixel((0, 0)))


def kinds(result):
    """Other models with grids of patches. Their processors for videos need torchvision; those for images do not."""
    from transformers import (Qwen2_5_VLConfig, Qwen2VLConfig, Qwen2VLImageProcessorPil, Qwen3VLConfig,
        VideoLlama3Config, VideoLlama3ImageProcessorPil)

    text = dict(vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    ids = dict(image_token_id=280, video_token_id=281, vision_start_token_id=282, vision_end_token_id=283)
    vision = dict(depth=2, num_heads=2, patch_size=14, spatial_merge_size=2, temporal_patch_size=2)
    configs = {
        "qwen2": Qwen2VLConfig(text_config={**text, "rope_parameters": rope}, vision_config={
            **vision, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2}, **ids),
        "qwen2.5": Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, vision_config={
            **vision, "hidden_size": 64, "intermediate_size": 64, "out_hidden_size": 64, "fullatt_block_indexes": [1],
            "window_size": 56}, **ids),
        "qwen3": Qwen3VLConfig(text_config={**text, "rope_parameters": {**rope, "mrope_interleaved": True}},
            vision_config={**vision, "hidden_size": 64, "intermediate_size": 64, "out_hidden_size": 64,
            "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}, **ids),
    }
    # The positions of this model have one dimension.
    plain = {k: v for k, v in text.items() if k != "head_dim"}
    configs["video_llama3"] = VideoLlama3Config(image_token_id=280, video_token_id=281,
        text_config={**plain, "model_type": "qwen2", "max_position_embeddings": 500},
        vision_config=dict(
            hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, patch_size=14))
    for name, config in configs.items():
        torch.manual_seed(0)
        transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(name)
        kind = VideoLlama3ImageProcessorPil if name == "video_llama3" else Qwen2VLImageProcessorPil
        own = {"patch_size": 14, "merge_size": 1} if name == "video_llama3" else {}
        kind(size={"shortest_edge": 784, "longest_edge": 20 * 784}, **own).save_pretrained(name)
        policy = load(name, "float32")  # compares packed with single sequences, two of which show images
        parts = [(tokens, np.arange(1, len(tokens)), shown) for tokens, shown in policy.vision.example()]
        with torch.no_grad():
            packed = policy(*row_of(parts, policy))[0]
            each = torch.cat([policy(*row_of([part], policy))[0] for part in parts])
        tower = gradients(policy, [parts])
        result[name] = [float((packed - each).abs().max()), sum("visual" in n or "vision" in n for n in tower)]


def shared(ranks):
    """Gradients and parameters after a step. Two ranks have half of the sequences each, one of them without images."""
    torch.manual_seed(5)
    policy = load("tiny", "float32", ranks, recompute=True)
    optimizer = Optimizer(policy, 1e-3)
    parts = row(policy)
    halves = [[parts[0], parts[1], parts[3]], [parts[2]]]
    found = gradients(policy, halves if ranks.count == 1 else [halves[ranks.rank]])
    optimizer.step()
    return found, copies(optimizer.masters)


def main():
    torch.set_num_threads(1)
    ranks = join()
    if ranks.first:
        make(Path("tiny"), vision=True)
    ranks.barrier()
    both = shared(ranks)
    if not ranks.first:
        return ranks.leave()
    result = {}
    single = shared(ProcessGroup(0, 1, ranks.device))
    result["ranks"] = [distance(two, one) for one, two in zip(single, both)]
    alone(result)
    refusals(result)
    kinds(result)
    ranks.leave()
    print(json.dumps(result))


main()
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("vision"), ranks=2)


def test_packed_rows_equal_single_rows_in_value_and_gradient(found):
    assert found["value"] <= 1e-6
    assert found["gradient"] <= 1e-6
    assert found["recomputed"] <= 1e-5
    assert found["tower"] > 10


def test_log_probabilities_are_those_of_the_models_own_forward_pass(found):
    assert found["own"] <= 1e-5
    assert found["effect"] > 1e-2, "other pixels of the same size change the text after them"


def test_a_frozen_vision_part_is_not_trained(found):
    assert found["frozen"][0] == 0
    assert found["frozen"][1] > 10
    assert found["language"] <= 1e-5


def test_adapters_are_of_the_language_model(found):
    assert found["lora"][0] == found["lora"][1] > 0


def test_two_ranks_learn_what_one_does_although_one_of_them_sees_no_image(found):
    gradients, parameters = found["ranks"]
    assert gradients <= 1e-5
    assert parameters <= 1e-4


@pytest.mark.parametrize("kind", ["qwen2", "qwen2.5", "qwen3", "video_llama3"])
def test_models_with_grids_of_patches_are_trained_on_packed_rows(found, kind):
    off, tower = found[kind]
    assert off <= 1e-5
    assert tower > 10


def test_placeholders_that_the_model_does_not_reproduce_are_refused_before_a_step(found):
    assert "gives the image" in found["length"]
    assert "6 tokens, but the engine gave it 5" in found["length"]
    assert "are not the placeholders of an image (259)" in found["moved"]
    assert "no token is between the images" in found["touching"]
    for name in ("length", "moved", "touching"):
        assert found[name].startswith("tiny: ")
        assert found[name].endswith("no step was taken")


def test_images_that_are_none_are_named(found):
    for name in ("damaged", "bomb", "text"):
        assert f"the image {name}… (image/png) cannot be decoded" in found[name]


def test_a_model_without_a_processor_or_a_vision_part_is_refused(found):
    assert found["bare"].startswith("bare: has no image processor")
    assert "preprocessor_config.json" in found["bare"]
    assert found["text only"].startswith("text: takes text only")
    assert "training.policies.*.base" in found["text only"]
    assert "vision: frozen" in found["frozen text"]


def test_images_are_decoded_as_the_engine_does(found):
    assert found["options"] == 2
    for kind in ("RGBA PNG", "L PNG", "RGB JPEG", "RGB WEBP"):
        assert found[kind] == ["RGB", 30, 20]
    assert found["clear"] == [255, 255, 255]
    assert found["keyed"] == [10, 20, 30], "vLLM leaves an RGB image as it is, even with a transparent colour"
