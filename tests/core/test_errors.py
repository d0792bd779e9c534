"""What messages say."""

from monetrun.core.errors import MonetrunError, word_as_arguments


def test_messages_name_options_as_they_are_given_here():
    hint = (
        "fits: --budget 6625KiB or 0.52x; --implementations exact leaves them out; give more (--budget), --strict;"
        " --nproc-per-node 2"
    )
    error = MonetrunError("--solver-seconds 3: too short", hint)
    assert str(error).endswith(hint)
    word_as_arguments(("budget", "implementations", "solver_seconds", "strict"))
    try:
        assert str(error) == (
            'solver_seconds=3: too short\n  fits: "6625KiB" or 0.52x; implementations="exact" leaves them out;'
            " give more (budget), strict; --nproc-per-node 2"
        )
    finally:
        word_as_arguments(())
