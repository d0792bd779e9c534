"""Keys of fx nodes' ``meta``, and of autograd nodes' ``metadata``, that several modules of the capture read."""

STEP = "monetrun_step"  # of a call in a module that ``execute`` builds: the schedule's step
ONE_CALL_WITH_NEXT = "monetrun_one_call_with_next"  # see ``Operator.one_call_with_next``
AGAIN = "monetrun"  # of an autograd node: what runs its call again (``capture.again``)
# of an autograd node: which of its call's results it is, that has a twin (``capture.output_views``); of a twin: True
TWIN = "monetrun_twin"
