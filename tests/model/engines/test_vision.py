"""A real vLLM (CPU build) that sees images, and the trainer on what it recorded."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgpack
import pytest

from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.rundir import weights
from megaflow_hpc.trajectory import Recording, image_records
from megaflow_hpc.types import ModelEndpoint
from tests.support.engines import make_model, reversed_weights
from tests.support.samples import image, png
from tests.support.serving import Servers, answer_to, ask_engine
from tests.support.torch_ranks import run_ranks
from tests.support.vision import PLACEHOLDER

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TRAINER = r"""
import json, sys
from pathlib import Path
import msgpack
import numpy as np
import torch
from megaflow_hpc.training.microbatch import images_of_sequence
from megaflow_hpc.training.trainer.model import load, row_of
from megaflow_hpc.trajectory import TokenSequence, images_of

path, models = sys.argv[1], json.loads(sys.argv[2])  # the model of each version
record = msgpack.unpackb(Path(path).read_bytes())
images = images_of(record["images"])
sequences = [TokenSequence.from_record(sequence) for sequence in record["sequences"]]
policies = [load(model, "float32") for model in models]
parts = []
for sequence in sequences:
    mask = np.frombuffer(sequence.loss_mask, np.uint8)
    parts.append((np.array(sequence.tokens), mask.nonzero()[0], images_of_sequence(sequence, images)))
engine = np.concatenate([np.frombuffer(s.logprobs, np.float32) for s in sequences])
versions = np.concatenate([np.frombuffer(s.weight_versions, np.int32) for s in sequences])


def apart(policy, version):  # how far the engine's log-probabilities of a version's tokens are from this model's
    with torch.no_grad():
        row = row_of(parts, policy)  # one packed row of all sequences and images
        ours = policy(*row)[0].numpy()
    where = row[3].numpy()
    where = where[versions[where] == version]
    return float(np.abs(ours[where] - engine[where]).max())


found = {"tokens": np.bincount(versions[versions >= 0]).tolist(), "images": sum(len(p[2]) for p in parts)}
found["apart"] = [apart(policy, version) for version, policy in enumerate(policies)]
# The newest model with the first one's part that sees, as an engine would be that kept what it made of images.
first, mixed = dict(policies[0].named_parameters()), policies[-1]
with torch.no_grad():
    for name, parameter in mixed.named_parameters():
        if name.split(".")[2] in ("visual", "projector"):
            parameter.copy_(first[name])
found["mixed"] = apart(mixed, len(models) - 1)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("seeing") / "tiny", vision=True, context=2048)


@pytest.fixture(scope="module")
def vllm(interpreter: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("vllm")) as servers, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        args: dict[str, Any] = {"max-model-len": 2048, "dtype": "float32", "distributed-executor-backend": "uni"}
        args["limit-mm-per-prompt"] = json.dumps({"image": 8})
        section: dict[str, Any] = {"engine": "vllm", "path": str(model), "gpus": 0, "python": interpreter}
        section |= {"args": args, "weights": "continue"}
        servers.start(section, "default", "--poll-s", "0.3")
        servers.record(0, timeout_s=600)
        yield servers


def part(number: int, width: int, height: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image(width, height, number).url}}


async def talk(model: ModelEndpoint, seed: int, tokens: int = 12) -> None:
    """Talks about images of several sizes. Two of one size follow each other, one is shown twice."""
    shown = [[part(seed, 84, 56), part(seed + 1, 84, 56)], [part(seed + 2, 131, 200)], [], [part(seed, 84, 56)]]
    messages: list[dict[str, Any]] = []
    for turn, images in enumerate(shown):
        messages.append({"role": "user", "content": [*images, {"type": "text", "text": f"What now, {turn}?"}]})
        reply = await answer_to(model, {"messages": messages, "max_tokens": tokens, "seed": seed})
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})


@pytest.fixture
def neighbour() -> Iterator[tuple[str, list[str]]]:
    """Yields a service on the node's loopback, which redirects to a private page, and the requested paths."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(302 if self.path == "/redirect" else 200)
            self.send_header("Location", "/internal")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()
        thread.join()


async def test_vllm_itself_fetches_nothing(vllm: Servers, neighbour: tuple[str, list[str]], tmp_path: Path) -> None:
    """An agent reaches it through the gateway alone, which passes on no address."""
    url, seen = neighbour
    file = tmp_path / "image.png"
    file.write_bytes(png(56, 56))
    expected = {
        f"{url}/direct": "allowed domains",
        f"{url}/redirect": "allowed domains",
        f"file://{file}": "Cannot load local files",
    }
    for address, said in expected.items():
        content = [{"type": "image_url", "image_url": {"url": address}}]
        body = {"model": "default", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        status, reply = await ask_engine(vllm, "/v1/chat/completions", body)
        assert status >= 400
        assert said in reply["error"]["message"]
    assert seen == []


async def recorded(vllm: Servers) -> list[Recording]:
    async with ModelGateway(wait_s=60) as gateway:
        gateway.update_endpoints([{**vllm.record(0), "protocol": "split"}])
        names = [f"t/default/{number}" for number in range(4)]
        models = [await gateway.open(name, "default") for name in names]
        await asyncio.gather(*(talk(model, 10 * number) for number, model in enumerate(models)))
        return [await gateway.close(name) for name in names]


def test_engine_and_trainer_agree_token_by_token_with_images_in_the_prompt(
    vllm: Servers, model: Path, tmp_path: Path
) -> None:
    recordings = asyncio.run(recorded(vllm))
    for recording in recordings:
        assert recording.protocols == {"split": 4}
        assert recording.inexact == 0
        assert len(recording.sequences) == 1, "each prompt continues the sampled ids, and its images move along"
        for sequence in recording.sequences:
            for span in sequence.images:
                assert sequence.tokens[span.start : span.end].tolist() == [PLACEHOLDER] * span.length
                if (recording.images[span.image].width, recording.images[span.image].height) == (84, 56):
                    assert span.length == 6
    assert len({name for recording in recordings for name in recording.images}) == 12
    found = compared(recordings, tmp_path, model)
    assert sum(found["tokens"]) >= 4 * 4
    assert found["images"] >= 4 * 4
    assert max(found["apart"]) <= 1e-4


def compared(recordings: list[Recording], folder: Path, *models: Path) -> dict[str, Any]:
    """Returns what the trainer computes of recordings with the model of each version."""
    sequences = [sequence.to_record() for recording in recordings for sequence in recording.sequences]
    images = {name: shown for recording in recordings for name, shown in recording.images.items()}
    path = folder / "recorded"
    path.write_bytes(msgpack.packb({"sequences": sequences, "images": image_records(images)}))
    found: dict[str, Any] = run_ranks(TRAINER, folder, path, json.dumps(list(map(str, models))))
    print(found)
    return found


def test_new_weights_see_the_images_anew_and_so_do_requests_that_continue(
    vllm: Servers, model: Path, tmp_path: Path
) -> None:
    """The same images before and after, in calls that are under way too: nothing is left of what the old ones made."""
    other = reversed_weights(model, tmp_path / "other")

    async def scenario() -> list[Recording]:
        async with ModelGateway(wait_s=60) as gateway:
            gateway.update_endpoints([{**vllm.record(0), "protocol": "split"}])
            models = [await gateway.open(f"t/default/{number}", "default") for number in range(4)]
            changed = asyncio.Event()

            async def keep_talking(model: ModelEndpoint, seed: int) -> None:
                while not changed.is_set():
                    await talk(model, seed, 150)
                await talk(model, seed)

            talking = [asyncio.create_task(keep_talking(model, 10 * number)) for number, model in enumerate(models)]
            await asyncio.sleep(0.5)
            published = await asyncio.to_thread(weights.publish, vllm.run, other)
            while vllm.record(0)["weight_version"] != published.version:
                await asyncio.sleep(0.1)
            changed.set()
            await asyncio.gather(*talking)
            return [await gateway.close(f"t/default/{number}") for number in range(4)]

    recordings = asyncio.run(scenario())
    versions = [set(sequence.weight_versions) for recording in recordings for sequence in recording.sequences]
    assert any({0, 1} <= of for of in versions), "a sequence went on over the change"
    found = compared(recordings, tmp_path, model, other)
    assert max(found["apart"]) <= 1e-4
    assert found["mixed"] > 1e-3
