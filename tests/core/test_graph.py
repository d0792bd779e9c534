"""Graphs and costs that are read from files are checked."""

from dataclasses import replace

import pytest

from monetrun.core.graph import Requests, check
from monetrun.core.plain_step import plain_step
from support.step_records import chain_record


@pytest.mark.parametrize("table", ["seconds", "workspace_bytes", "requests"])
def test_costs_of_another_number_of_operators_or_implementations_are_refused(table):
    (graph,), (costs,) = chain_record(10).graphs, chain_record(10).costs
    costs = replace(costs, requests=tuple((Requests(),) * len(row) for row in costs.seconds))
    check(graph, costs)
    rows = getattr(costs, table)
    for other in (rows[:-1], (*rows, rows[-1]), (rows[0] * 2, *rows[1:])):
        with pytest.raises(ValueError, match="different operators or implementations"):
            check(graph, replace(costs, **{table: other}))


def test_the_last_operator_has_no_next_one_to_be_one_call_with():
    record = chain_record(10)
    (graph,) = record.graphs
    last = replace(graph.operators[-1], one_call_with_next=True)
    changed = replace(record, graphs=(replace(graph, operators=(*graph.operators[:-1], last)),))
    assert plain_step(changed)[0].costs == record.costs
