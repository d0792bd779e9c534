"""What a plan computes beside the plain step, by its costs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.core.step import StepRecord
from monetrun.planning import extra_work as module
from support.step_records import chain_record


def extra_work(record: StepRecord, schedules: list[Schedule]) -> float:
    return module.extra_work(record, SimpleNamespace(graphs=[SimpleNamespace(schedule=s) for s in schedules]))


def test_the_plain_step_has_none_and_what_runs_again_counts_by_its_seconds():
    record = chain_record(6)
    (graph,), (costs,) = record.graphs, record.costs
    plain = plain_schedule(graph)
    assert extra_work(record, [plain]) == 0.0
    again = Schedule(plain.forward, (Step(2), Step(1), Step(2), *plain.backward))
    seconds = sum(costs.seconds[step.operator][0] for step in (*plain.forward, *plain.backward))
    more = 2 * costs.seconds[2][0] + costs.seconds[1][0]
    assert extra_work(record, [again]) == pytest.approx(more / seconds)


def test_a_slower_implementation_counts_by_what_it_takes_longer_and_a_faster_one_not():
    record = chain_record(6)
    (graph,), (costs,) = record.graphs, record.costs
    plain = plain_schedule(graph)
    first = graph.operators[0]
    operators = (replace(first, implementations=(first.implementations[0],) * 2), *graph.operators[1:])
    other = Schedule((Step(0, 1), *plain.forward[1:]), plain.backward)
    total = sum(costs.seconds[step.operator][0] for step in (*plain.forward, *plain.backward))
    default = costs.seconds[0][0]
    for own, more in ((3 * default, 2 * default), (default / 2, 0.0)):
        with_other = replace(
            record,
            graphs=(replace(graph, operators=operators),),
            costs=(replace(costs, seconds=((default, own), *costs.seconds[1:])),),
        )
        assert extra_work(with_other, [other]) == pytest.approx(more / (total - default + own - more))
