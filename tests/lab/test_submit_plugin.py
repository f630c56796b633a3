"""A site whose submit plugin refuses jobs in its own words: the user sees them, the job, and the key to change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.errors import SiteError
from tests.support.campaigns import Make, cli
from tests.support.labs import Lab, own_lab, pods

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]

PLUGIN = """\
function slurm_job_submit(job_desc, part_list, submit_uid)
   if job_desc.time_limit == 4294967294 then
      slurm.log_user("SITE: every job must state a walltime: --time. See https://site/docs/time")
      slurm.log_user("SITE: ask support for help")
      return slurm.ERROR
   end
   if job_desc.account == nil then
      slurm.log_user("SITE: every job must state an account: --account")
      return slurm.ERROR
   end
   return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
   return slurm.SUCCESS
end
return slurm.SUCCESS
"""


@pytest.fixture
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if not list(Path("/usr/lib").glob("*/slurm-wlm/job_submit_lua.so")):
        pytest.fail("job_submit_lua.so is not here; install Slurm's basic plugins, or deselect this test")
    folder = tmp_path_factory.mktemp("strict")
    (folder / "job_submit.lua").write_text(PLUGIN)
    with own_lab(folder, "JobSubmitPlugins=lua\nEnforcePartLimits=ALL\n") as lab:
        yield lab


def test_the_words_of_a_submit_plugin_are_in_the_error(strict: Lab, make_campaign: Make) -> None:
    without_time = pods(count=1, ranks=1).replace(", time: 10", "")
    assert "time" not in without_time
    campaign = make_campaign(1, without_time)
    with pytest.raises(SiteError) as refused:
        Campaign.from_yaml(campaign).submit()
    words = str(refused.value)
    assert "sbatch refused the pods job (slurm.pods of the campaign): SITE: every job must state a walltime" in words
    assert "SITE: ask support for help" in words
    assert words.endswith("; see slurm.pods.time"), words
    done = cli("run", campaign)
    assert done.returncode == 3
    assert "SITE: every job must state a walltime" in done.stderr.splitlines()[-1]
    campaign.write_text(campaign.read_text().replace("mem: 1G", "mem: 1G, time: 10"))
    with pytest.raises(SiteError, match=r"SITE: every job must state an account.*; see slurm.account"):
        Campaign.from_yaml(campaign).submit()
