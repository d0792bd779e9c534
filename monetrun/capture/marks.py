"""Keys of fx nodes' ``meta``, and of autograd nodes' ``metadata``, that several modules of the capture read."""

STEP = "monetrun_step"  # of a call in a module that ``execute`` builds: the schedule's step
ONE_CALL_WITH_NEXT = "monetrun_one_call_with_next"  # see ``Operator.one_call_with_next``
AGAIN = "monetrun"  # of an autograd node: what runs its call again (``capture.again``)
GIVEN_APART = "monetrun_given_apart"  # of such a view of an output: which output; of its call: that it is one's twin
