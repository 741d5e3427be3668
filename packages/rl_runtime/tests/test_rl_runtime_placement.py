import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_runtime.errors import PlacementError
from rl_runtime.placement import plan_placement


@given(
    num_gpus=st.integers(1, 16),
    num_ranks=st.integers(1, 8),
    num_servers=st.integers(0, 4),
    tp=st.integers(1, 4),
    colocate=st.booleans(),
    num_critic_ranks=st.integers(0, 3),
)
def test_every_process_has_its_gpus_and_none_is_given_twice(
    num_gpus: int, num_ranks: int, num_servers: int, tp: int, colocate: bool, num_critic_ranks: int
) -> None:
    own_ranks = {"critic": num_critic_ranks} if num_critic_ranks else {}
    all_ranks = num_ranks + num_critic_ranks
    needed = max(all_ranks, num_servers * tp) if colocate else all_ranks + num_servers * tp

    def plan():  # type: ignore[no-untyped-def]
        return plan_placement(
            gpu_ids=range(num_gpus),
            device="auto",
            num_ranks=num_ranks,
            num_servers=num_servers,
            tensor_parallel_size=tp,
            colocate=colocate,
            own_ranks=own_ranks,
        )

    if needed > num_gpus:
        with pytest.raises(PlacementError, match=str(needed)):
            plan()
        return
    placement = plan()
    critic_gpus = placement.own_rank_gpus.get("critic", ())
    rank_gpus = [gpu for gpus in (*placement.rank_gpus, *critic_gpus) for gpu in gpus]
    server_gpus = [gpu for gpus in placement.server_gpus for gpu in gpus]
    assert len(rank_gpus) == len(set(rank_gpus)) == all_ranks == placement.num_ranks
    assert len(critic_gpus) == num_critic_ranks
    assert placement.num_gpus == len(set(rank_gpus + server_gpus))
    assert len(server_gpus) == len(set(server_gpus)) == num_servers * tp
    assert colocate or not set(rank_gpus) & set(server_gpus)
    assert set(rank_gpus + server_gpus) <= set(range(num_gpus))


@pytest.mark.parametrize(("gpu_ids", "device"), [([], "auto"), ([0, 1], "cpu")])
def test_without_gpus_everything_runs_on_the_cpu(gpu_ids: list[int], device: str) -> None:
    placement = plan_placement(
        gpu_ids=gpu_ids, device=device, num_ranks=2, num_servers=1, tensor_parallel_size=1, colocate=True
    )
    assert not placement.on_gpu
    assert placement.rank_gpus == ((), ())
