"""megaflow_hpc by Spack: ``spack repo add launchers/site/spack_repo/megaflow_hpc``, ``spack install megaflow-hpc``.

Spack provides Python and MPI, for which mpi4py is built. The other packages of Python come, in the versions that this
project was tried with, from the index that pip is configured with: Spack lacks some of them, or has them too old.
"""

from spack.package import Executable, Package, depends_on, join_path, license, version


class MegaflowHpc(Package):
    """LLM agent rollouts at scale on Slurm: model servers, Apptainer sandboxes and MPI pods from one YAML file."""

    homepage = "https://github.com/megaflow-hpc/megaflow_hpc"
    git = "https://github.com/megaflow-hpc/megaflow_hpc.git"

    license("Apache-2.0")
    version("main", branch="main")

    depends_on("c", type="build")
    depends_on("python@3.11:3.13", type=("build", "run"))
    depends_on("mpi", type=("build", "link", "run"))

    def install(self, spec, prefix):
        spec["python"].command("-m", "venv", prefix)
        versions = join_path(self.stage.path, "versions.txt")
        with open(join_path("launchers", "requirements.txt")) as listed, open(versions, "w") as chosen:
            # "name==version ; marker \" begins a package, its hashes follow: pip wants them of all or of none.
            chosen.writelines(line.removesuffix(" \\\n") + "\n" for line in listed if line[0] not in " #\n")
        pip = Executable(prefix.bin.pip)
        pip.add_default_env("MPICC", spec["mpi"].mpicc)
        pip("install", "--no-binary", "mpi4py", "--constraint", versions, ".[run]")
