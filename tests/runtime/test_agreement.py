"""All ranks run rank 0's plan, or say why not."""

import pytest
import torch

from monetrun.core import codec
from monetrun.core.errors import InfeasibleBudget, PlanMismatch
from monetrun.planning import planner
from monetrun.runtime import agreement
from support.step_records import chain_record

RECORD = chain_record(10)
PLAN = planner.plan_step(RECORD, 1 << 20)
DEVICE = torch.device("cuda", 1)
OTHER = planner.plan_step(RECORD, 1 << 21)


@pytest.fixture
def in_rank(monkeypatch):
    """Makes this process a rank of two; ``sent`` is what rank 0 broadcasts, or what this rank has broadcast."""

    def become(rank, sent, backend="gloo", over=None):
        def broadcast(objects, src, device):
            assert (src, device) == (0, over)
            if rank == 0:
                sent[:] = objects
            objects[:] = sent

        for name, value in (
            ("is_initialized", lambda: True),
            ("get_world_size", lambda: 2),
            ("get_rank", lambda: rank),
            ("get_backend", lambda: backend),
            ("broadcast_object_list", broadcast),
        ):
            monkeypatch.setattr(torch.distributed, name, value)

    return become


def test_a_process_of_its_own_plans_by_itself():
    agreement.check_same_plan(PLAN, DEVICE)
    assert agreement.plan_in_rank_0(lambda: PLAN, DEVICE) is PLAN


def test_other_ranks_get_rank_0s_plan_without_planning(in_rank):
    sent = []
    in_rank(0, sent)
    assert agreement.plan_in_rank_0(lambda: PLAN, DEVICE) == PLAN
    assert sent == [codec.dumps(PLAN)]
    in_rank(1, sent)
    assert agreement.plan_in_rank_0(lambda: pytest.fail("rank 1 planned"), DEVICE) == PLAN


def test_where_rank_0_has_no_plan_it_says_why_and_the_others_end_too(in_rank):
    def refuse():
        raise InfeasibleBudget("too little", "more", budget_bytes=1, smallest_bytes=2)

    sent = []
    in_rank(0, sent)
    with pytest.raises(InfeasibleBudget, match="too little"):
        agreement.plan_in_rank_0(refuse, DEVICE)
    assert sent == [None]
    in_rank(1, sent)
    with pytest.raises(PlanMismatch, match="rank 0 found no plan"):
        agreement.plan_in_rank_0(refuse, DEVICE)


def test_ranks_with_different_plans_are_told_apart(in_rank):
    in_rank(1, [PLAN.digest])
    agreement.check_same_plan(PLAN, DEVICE)
    with pytest.raises(PlanMismatch, match=rf"rank 1 has plan {OTHER.digest}, rank 0 has {PLAN.digest}"):
        agreement.check_same_plan(OTHER, DEVICE)


def test_nccl_sends_over_this_ranks_device(in_rank):
    in_rank(0, [], backend="nccl", over=DEVICE)
    agreement.check_same_plan(PLAN, DEVICE)
