"""Builds the images that a store lacks on compute nodes: a job array, waited for, and what each image came to.

Here nothing is built. An array of at most ``slurm.builds.count`` elements builds and fetches (:mod:`.image_batch`);
where compute nodes have no way out, ``slurm.builds.fetch: here`` has fetched here what comes from a registry. Slurm and
the store hold all there is to know: whoever asks again while an array is queued or runs waits for it, and what was
built stays.
"""

from __future__ import annotations

import secrets
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megaflow_hpc.campaign.image_batch import Batch, Recipe, Result, Wanted, asked_for
from megaflow_hpc.campaign.job_environment import site_environment
from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.config.slurm import SlurmConfig
from megaflow_hpc.environments.builds.forecast import foretell
from megaflow_hpc.environments.images.disk_quota import VARIABLE
from megaflow_hpc.environments.images.mapping import ImageMapping, ImageRequest, match_name
from megaflow_hpc.environments.images.registries import is_remote
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.slurm import accounting, limits, site
from megaflow_hpc.slurm.fits import timed
from megaflow_hpc.slurm.ids import scancel
from megaflow_hpc.slurm.script import IMAGES, images_job
from megaflow_hpc.texts import printable

FIRST_LOOK_S, LOOK_S = 2.0, 15.0
"""Seconds between two looks, which are one squeue for all arrays: at first, and when it takes longer."""
LOG_CHARACTERS = 1000
OLD_S = 7 * 86400.0
"""Batches are kept so long for their logs, where an image failed."""


@dataclass(frozen=True)
class Outcome:
    """What came of one image."""

    name: str
    state: Literal["there", "fetched", "built", "queued", "failed"]
    file: str = ""
    error: str = ""


@dataclass
class _Watched:
    """A batch that Slurm has, and which image of ours each of its images is."""

    array: str
    batch: Batch
    ours: dict[int, list[int]]
    submitted: bool
    gone: bool = False


class ImageJobs:
    """Images that are built by jobs.

    Args:
        store: What they are built into; its jobs write to it.
        say: Gets lines of progress.
    """

    def __init__(self, store: ImageStore, slurm: SlurmConfig, say: Callable[[str], None]) -> None:
        self._store, self._slurm, self._say = store, slurm, say

    def build(self, wanted: Iterable[Wanted], detach: bool = False) -> list[Outcome]:
        """Has built what the store lacks, and returns what came of each image; an interrupted wait cancels the array.

        Args:
            detach: Do not wait: what is lacking is then ``queued``.

        Raises:
            ConfigError: A name is not mapped, or mapped to nothing that exists.
            SiteError: The store is not the caller's, or Slurm refuses.
        """
        wanted = list({(one.name, id(one.recipe)): one for one in wanted}.values())
        outcomes: dict[int, Outcome] = {}
        lacking: dict[int, str] = {}
        stores: dict[int, Images] = {}
        for number, one in enumerate(wanted):
            if id(one.recipe) not in stores:
                stores[id(one.recipe)] = one.recipe.asking(self._store)
                stores[id(one.recipe)].say = self._say
                stores[id(one.recipe)].looks = None  # where jobs fetch, registries may be out of reach from here
            images = stores[id(one.recipe)]
            try:
                file, fetched = self._look(images, one)
            except SiteError as error:
                outcomes[number] = Outcome(one.name, "failed", error=str(error))
                continue
            if file.exists():
                outcomes[number] = Outcome(one.name, "fetched" if fetched else "there", str(file))
            else:
                lacking[number] = asked_for(one, images)
        self._say(f"images: {len(wanted)}, to be built: {len(lacking)}")
        failed = {number for number, outcome in outcomes.items() if outcome.state == "failed"}
        if lacking:
            rest = [one for number, one in enumerate(wanted) if number not in failed]
            first = stores[id(rest[0].recipe)]
            foretell(first, ((one.request, one.recipe.image_mapping(), one.recipe.network) for one in rest))
            outcomes |= self._by_jobs(wanted, lacking, detach)
        return [outcomes[number] for number in range(len(wanted))]

    def _look(self, images: Images, wanted: Wanted) -> tuple[Path, bool]:
        """The image's file, there or not, and whether it was just fetched; whatever it needs of a registry is there."""
        mapping, request = wanted.recipe.image_mapping(), wanted.request
        if request.dockerfile is None:
            file = images.resolve_request(request, mapping, build=False)
            if not file.exists() and self._fetched_here(wanted, request.base or request.name):
                return images.resolve_request(request, mapping), True
            return file, False
        for name in images.dockerfiles.read(request.dockerfile).bases:
            if self._fetched_here(wanted, name):
                images.resolve(name, mapping, task_path=request.path)
        return images.resolve_request(request, mapping, build=False), False

    def _fetched_here(self, wanted: Wanted, name: str) -> bool:
        return self._slurm.builds.fetch == "here" and is_remote(match_name(name, wanted.recipe.mapping) or "")

    # --- by jobs ---

    def _by_jobs(self, wanted: Sequence[Wanted], lacking: dict[int, str], detach: bool) -> dict[int, Outcome]:
        """What came of images that are not there, by their numbers."""
        if not site.has_slurm():
            raise SiteError("sbatch: not found; load the site's Slurm module, or build without --slurm")
        self._store.prepare(wanted[next(iter(lacking))].name)
        watched = self._under_way(lacking)
        awaited = {number for one in watched for numbers in one.ours.values() for number in numbers}
        try:
            if rest := {number: target for number, target in lacking.items() if number not in awaited}:
                watched.append(self._submit(wanted, rest))
            if detach:
                for one in watched:
                    self._say(f"job {one.array} builds them; the same command again waits for it")
                return {number: Outcome(wanted[number].name, "queued") for number in lacking}
            return self._wait(wanted, lacking, watched)
        except BaseException:
            if mine := [one.array for one in watched if one.submitted and not one.gone and not detach]:
                with suppress(SiteError):
                    self._cancel(mine)
            if others := [one.array for one in watched if not one.submitted and not one.gone]:
                self._say(f"job {' '.join(others)}, which was submitted before, goes on")
            raise

    @staticmethod
    def _queued() -> dict[str, str]:
        """The arrays of this user that build images and have not ended, by the name of their batch."""
        queued = site.ask("squeue", "-h", "--me", f"--name={IMAGES}", "-o", "%F|%k")
        return {comment: array for array, _, comment in (line.partition("|") for line in queued.splitlines())}

    def _cancel(self, arrays: Sequence[str]) -> None:
        scancel(arrays)
        self._say(f"job {' '.join(arrays)} is cancelled; what was built stays")

    def _under_way(self, lacking: dict[int, str]) -> list[_Watched]:
        """Arrays that were submitted before and build some of what is lacking; removes batches that are old."""
        work, found = self._store.root / "work", []
        arrays = self._queued()
        for path in work.glob("batch-*/"):
            if path.name not in arrays:
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > OLD_S:
                        remove_tree(path)
                continue
            with suppress(SiteError):
                batch = Batch.read(path)
                live = accounting.live_jobs([arrays[path.name]])
                ended = batch.results()
                ours: dict[int, list[int]] = {}
                for number, target in enumerate(batch.targets):
                    state = live.get(f"{arrays[path.name]}_{batch.element_of(number)}")
                    same = [mine for mine, name in lacking.items() if name == target]
                    if same and number not in ended and state is not None and state.live:
                        ours[number] = same
                if ours:
                    self._say(f"job {arrays[path.name]} builds {len(ours)} of them already")
                    found.append(_Watched(arrays[path.name], batch, ours, submitted=False))
        return found

    def _submit(self, wanted: Sequence[Wanted], lacking: dict[int, str]) -> _Watched:
        """Queues one array for images that nobody builds."""
        from megaflow_hpc.slurm.submission import submit

        targets: dict[str, list[int]] = {}
        for number, target in lacking.items():
            targets.setdefault(target, []).append(number)
        run = RunDir(self._store.root / "work" / f"batch-{secrets.token_hex(4)}")
        options = images_job(self._slurm, run, 1).options
        allowed = limits.allowance(options)
        elements = min(len(targets), self._slurm.builds.count, allowed.array_size)
        if allowed.room is not None:
            elements = min(elements, allowed.room)
        if not elements:
            raise SiteError(f"{allowed.why} jobs at once and {allowed.queued} are queued; wait until some have ended")
        batch = Batch(run, elements, [wanted[numbers[0]] for numbers in targets.values()], list(targets))
        stores = ":".join(map(str, self._store.roots))
        batch.write([*site_environment(self._slurm.setup), f"export {VARIABLE}={shlex.quote(stores)}"])
        throttle = min(filter(None, (self._slurm.builds.throttle, allowed.running, elements)))
        try:
            job = images_job(self._slurm, run, elements, None if throttle == elements else throttle)
            handles = submit(run, timed(job))
        except BaseException:  # Ctrl-C may come when sbatch has queued it and not yet said so
            with suppress(SiteError):
                if array := self._queued().get(run.path.name):
                    self._cancel([array])
            remove_tree(run.path)
            raise
        array = handles[0].job_id.partition("_")[0]
        self._say(f"job {array} builds them: images: {len(targets)}, elements: {elements}, logs: {run.logs}")
        return _Watched(array, batch, dict(enumerate(targets.values())), submitted=True)

    # --- wait ---

    def _wait(self, wanted: Sequence[Wanted], lacking: dict[int, str], watched: list[_Watched]) -> dict[int, Outcome]:
        began, pause_s, said = time.monotonic(), FIRST_LOOK_S, ""
        outcomes: dict[int, Outcome] = {}
        live: dict[str, accounting.JobState] | None = {}
        while True:
            # Asked before the results are read: what an element that is gone wrote is then there.
            with suppress(SiteError):  # the controller is away for a while; the jobs go on without it
                live = accounting.live_jobs([one.array for one in watched if not one.gone])
                for one in watched:
                    self._take(one, live, wanted, outcomes)
            states = Counter(job.state for job in (live or {}).values() if job.live)
            failed = sum(outcome.state == "failed" for outcome in outcomes.values())
            line = f"{len(outcomes) - failed} of {len(lacking)} images built, {failed} failed; " + (
                ", ".join(f"{count} {state.lower()}" for state, count in sorted(states.items())) or "no job is left"
            )
            if line != said:
                said = line
                self._say(f"{line} ({time.monotonic() - began:.0f} s)")
            if outcomes.keys() >= lacking.keys():
                break
            time.sleep(pause_s)
            pause_s = min(LOOK_S, pause_s * 1.2)
        for one in watched:
            if one.submitted and all(outcomes[n].state == "built" for numbers in one.ours.values() for n in numbers):
                remove_tree(one.batch.run.path, ignore_errors=True)
        return outcomes

    def _take(
        self,
        one: _Watched,
        live: dict[str, accounting.JobState],
        wanted: Sequence[Wanted],
        outcomes: dict[int, Outcome],
    ) -> None:
        """Takes over what of a batch has ended, and what can no more end since its element is gone."""
        results = one.batch.results()
        open_ = [number for number in one.ours if number not in results]
        lost = [number for number in open_ if not self._lives(one, number, live)]
        states = accounting.finished_jobs([one.array]) | live if lost else {}  # accounting lags behind
        for number in lost:
            results[number] = self._of_lost(one, one.batch.element_of(number), number, states)
        for number, numbers in one.ours.items():
            if result := results.get(number):
                for mine in numbers:
                    outcomes[mine] = (
                        Outcome(wanted[mine].name, "failed", error=result.error)
                        if result.error
                        else Outcome(wanted[mine].name, "built", result.file)
                    )
        one.gone = len(open_) == len(lost)

    @staticmethod
    def _lives(one: _Watched, number: int, live: dict[str, accounting.JobState]) -> bool:
        state = live.get(f"{one.array}_{one.batch.element_of(number)}")
        return state is not None and state.live

    def _of_lost(self, one: _Watched, element: int, number: int, states: dict[str, accounting.JobState]) -> Result:
        """What to say of an image whose element ended without a word about it."""
        wanted = one.batch.wanted[number]
        images = wanted.recipe.asking(self._store)
        with suppress(SiteError):
            file = images.resolve_request(wanted.request, wanted.recipe.image_mapping(), build=False)
            if file.exists():  # it was made, and the element killed before it could say so
                return Result(str(file))
        state = states.get(f"{one.array}_{element}")
        ended = f" as {state.state} on {state.node}" if state else ""
        log = one.batch.run.logs / f"images-{one.array}_{element}.log"
        text = ""
        with suppress(OSError):
            text = log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:].strip()
        return Result(error=f"{one.array}_{element} ended{ended} before it was built; {log}:\n{text or 'empty'}")


def build_by_jobs(
    config: CampaignConfig, images: Images, requests: Sequence[ImageRequest], mapping: ImageMapping
) -> dict[str, str]:
    """Has jobs build what a campaign that is planned wants, says so on stderr, and returns what failed: name → why.

    Raises:
        ConfigError: A name is not mapped, or mapped to nothing that exists.
        SiteError: Slurm refuses, or every image failed.
    """

    def say(line: str) -> None:
        print(printable(line), file=sys.stderr, flush=True)

    registries = images.registries
    recipe = Recipe(
        dict(mapping.names),
        str(mapping.base_dir),
        mapping.where,
        config.environment.network_of_builds,
        dict(registries.mirrors),
        registries.air_gapped,
    )
    jobs = ImageJobs(images.store, config.slurm, say)
    outcomes = jobs.build(Wanted.of(request, recipe) for request in requests)
    failed = {one.name: one.error for one in outcomes if one.state == "failed"}
    if len(failed) == len(outcomes):
        raise SiteError(f"no image could be built; of {outcomes[0].name}: {outcomes[0].error}")
    for name, error in failed.items():
        say(f"{name}: {error}")
    if failed:
        say(f"images that were not built: {len(failed)} of {len(outcomes)}; rollouts of their tasks will fail")
    return failed
