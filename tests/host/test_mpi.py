"""Network settings of an MPI that Slurm starts on several nodes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megaflow_hpc.host.address import interface_towards
from megaflow_hpc.host.mpi import network_variables

UCX = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\nMPICH CC:    cc\n"
STEP = {"MEGAFLOW_MPI": "pmi2", "SLURM_STEP_NUM_NODES": "2", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}
OVER_SOCKETS = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "sockets", "FI_SOCKETS_IFACE": "lo"}


@pytest.mark.parametrize("plugin", ["pmi2", "pspmi"])
def test_an_mpich_that_may_use_ucx_takes_libfabric_between_nodes_that_pmi_started(plugin: str) -> None:
    assert network_variables(UCX, STEP | {"MEGAFLOW_MPI": plugin}) == OVER_SOCKETS


def test_the_components_of_a_heterogeneous_job_are_several_nodes() -> None:
    assert network_variables(UCX, STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_HET_SIZE": "3"}) == OVER_SOCKETS


@pytest.mark.parametrize(
    ("library", "changed"),
    [
        (UCX, {"SLURM_STEP_NUM_NODES": "1"}),
        (UCX, {"MEGAFLOW_MPI": "pmix"}),
        (UCX, {"MPIR_CVAR_CH4_NETMOD": "ucx"}),
        (UCX, {"FI_PROVIDER": "verbs"}),
        (UCX.replace("ucx ofi", "ofi"), {}),
        (UCX.replace("ucx ofi", "ucx"), {}),
        ("Intel(R) MPI Library 2021.18 for Linux* OS", {}),
        ("Open MPI v5.0.11, package: Open MPI", {}),
    ],
)
def test_what_has_no_need_or_no_choice_is_left_alone(library: str, changed: dict[str, str]) -> None:
    assert network_variables(library, STEP | changed) == {}


def test_this_mpi_says_before_it_starts_which_networks_it_was_made_with() -> None:
    code = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        "from megaflow_hpc.host.mpi import network_variables; print(network_variables(MPI.Get_library_version()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | STEP, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == str(OVER_SOCKETS)


def test_the_interface_is_the_one_that_leads_there() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("127.77.0.1") == "lo"
    assert interface_towards("no address") == ""
