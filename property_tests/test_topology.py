"""Laws of reading the environment: what a launcher says comes back, damage is named."""

from hypothesis import given
from hypothesis import strategies as st

from fxtrain.state.topology import read_topology
from property_tests._environments import launched


@given(case=launched())
def test_every_launcher_reads_back(case):
    topology, env = case
    before = dict(env)
    assert read_topology(env) == topology
    assert env == before


USUAL = ["PATH", "HOME", "SLURM_JOB_NAME", "SLURM_CPUS_PER_TASK", "SLURM_GTIDS", "PMI_FD"]
USUAL += ["OMPI_MCA_btl", "PMIX_RANK", "ROLE_RANK", "CUDA_VISIBLE_DEVICES", "TPU_NAME", "PYTHON"]
noise = st.dictionaries(st.one_of(st.sampled_from(USUAL), st.text("QZ_", min_size=1)), st.text())


@given(case=launched(), noise=noise)
def test_other_variables_do_not_matter(case, noise):
    topology, env = case
    assert read_topology({**noise, **env}) == topology


@given(case=launched(), inner=launched(kinds=("torchrun",)))
def test_torchrun_inside_anything_is_torchrun(case, inner):
    topology, env = inner
    assert read_topology({**case[1], **env}) == topology
