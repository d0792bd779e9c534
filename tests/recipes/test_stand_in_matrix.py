"""What the matrix of trainings and budgets finds wrong with a launch."""

import stand_in_matrix

MIB = 1 << 20
SOUND = {
    "exit_code": 0,
    "script_steps": 8,
    "plain_peak_bytes": 1000 * MIB,
    "torchrun_allocated_bytes": 1000 * MIB,
    "plain_reserved_bytes": 1100 * MIB,
    "torchrun_reserved_bytes": 1100 * MIB,
    "budget_bytes": 660 * MIB,
    "script_reserved_bytes": 650 * MIB,
    "script_settled_retries": 0,
    "planned_peak_bytes": 600 * MIB,
    "measured_peak_bytes": 601 * MIB,
    "planned_reserved_bytes": 650 * MIB,
    "measured_reserved_bytes": 650 * MIB,
}


def found(**changes):
    return list(stand_in_matrix.wrong(SOUND | changes, 8))


def test_each_promise_that_is_not_kept_is_named():
    assert found() == []
    assert found(exit_code=80) == []
    assert found(exit_code=84) == ["exit code 84, 8 of 8 steps"]
    assert found(script_steps=3) == ["exit code 0, 3 of 8 steps"]
    assert found(plain_peak_bytes=990 * MIB) == ["plain allocated 1.0% off"]
    assert found(plain_reserved_bytes=None) == ["plain reserved 100.0% off"]
    assert found(script_reserved_bytes=661 * MIB) == ["reserved 661 MiB of 660 MiB"]
    assert found(script_settled_retries=2) == ["2 retries in settled steps"]
    assert found(planned_peak_bytes=620 * MIB) == ["planned allocated +3.16% off"]
    assert found(measured_reserved_bytes=600 * MIB) == ["reserved 50 MiB from the planned"]
    assert found(planned_peak_bytes=None, measured_peak_bytes=None) == []


def test_rows_of_other_launches_stay_and_those_of_the_same_are_replaced():
    def row(training, budget, ranks=1, **more):
        return {"training": training, "ranks": ranks, "budget": budget, **more}

    kept = [row("gan", "0.6x"), row("cnn", "0.5x", 2), row("cnn", "0.6x", exit_code=1)]
    new = [row("cnn", "0.6x", exit_code=0), row("cnn", "1.0x"), row("mine", "12MiB")]
    assert stand_in_matrix.merged(kept, new) == [
        row("cnn", "1.0x"),
        row("cnn", "0.6x", exit_code=0),
        row("gan", "0.6x"),
        row("cnn", "0.5x", 2),
        row("mine", "12MiB"),
    ]


def test_a_row_has_the_number_of_ranks_beside_what_the_launch_reports(monkeypatch):
    report = {"planned_reserved_bytes": 1, "ranks": [{"rank": 0}]}
    monkeypatch.setattr(stand_in_matrix, "run", lambda ranks, words: (80, [report], "", 1.0))
    row = stand_in_matrix.launch("cnn", 2, "0.5x", {"allocated_bytes": 1, "reserved_bytes": 1, "steps": 8}, 3.0)
    assert row["ranks"] == 2
    assert next(stand_in_matrix.cells(row)) == "cnn*2"
