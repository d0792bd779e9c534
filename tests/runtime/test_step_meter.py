"""Steps under a plan: their count, their peak, and the one that is measured in detail."""

from monetrun.capture.peaks import Peaks
from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.step import OUTSIDE
from monetrun.runtime.step_meter import StepMeter


class Allocated:
    """A meter of bytes that the test sets."""

    exact = True

    def __init__(self):
        self.now = self.peak = self.retries = 0

    def allocate(self, nbytes, high=0):
        self.peak = max(self.peak, self.now + high, self.now + nbytes)
        self.now += nbytes

    def current_bytes(self):
        return self.now

    def peak_bytes(self):
        return self.peak

    def reset_peak(self):
        self.peak = self.now

    def peaks(self):
        return Peaks(self.peak, 2 * self.peak, retries=self.retries)

    def synchronize(self):
        raise AssertionError("bytes are known without waiting for the device")


def metered(optimizers):
    """A meter, and what measures steps by it that have so many optimizers."""
    meter = Allocated()
    steps = StepMeter(meter)
    steps.measure_a_settled_step(optimizers)
    return meter, steps


def train(steps, meter, workspace=50):
    """A step that saves 100 bytes and takes ``workspace`` more at its highest, in the loss."""
    steps.forward_begins()
    steps.call_begins()
    meter.allocate(100)
    steps.call_ended(FORWARD, 0)
    meter.allocate(0, workspace)
    steps.call_begins()
    meter.allocate(-100)
    steps.call_ended(BACKWARD, 0)
    steps.optimizer_begins()
    meter.allocate(0, 7)
    steps.optimizer_ended("SGD", 0)


def test_the_third_step_is_measured_stretch_by_stretch_and_its_peak_is_kept():
    meter, steps = metered(1)
    for _ in range(2):
        train(steps, meter)
    assert steps.stretches == ()
    assert steps.peak_bytes == 150
    train(steps, meter, workspace=70)
    assert steps.peak_bytes == 170
    train(steps, meter)
    assert (steps.steps, steps.peak_bytes) == (4, 170)
    assert [(s.kind, s.graph, s.name, s.start_bytes, s.peak_bytes, s.end_bytes) for s in steps.stretches] == [
        (OUTSIDE, -1, "", 0, 0, 0),
        (FORWARD, 0, "", 0, 100, 100),
        (OUTSIDE, -1, "", 100, 170, 100),
        (BACKWARD, 0, "", 100, 100, 0),
        (OUTSIDE, -1, "", 0, 0, 0),
        (OUTSIDE, -1, "SGD.step", 0, 7, 0),
    ]


def test_a_training_step_may_have_several_optimizers():
    meter, steps = metered(2)
    for _ in range(7):
        train(steps, meter)
    assert [s.name for s in steps.stretches if s.name] == ["SGD.step", "SGD.step"]
    assert sum(s.kind == FORWARD for s in steps.stretches) == 2
    assert (steps.steps, steps.training_steps) == (7, 4)


def test_optimizers_that_step_within_one_backward_make_one_training_step():
    meter, steps = metered(3)
    steps.measure_a_settled_step(3, 1)
    settled = []
    for _ in range(5):
        train(steps, meter)
        for _ in range(2):
            steps.optimizer_ended("SGD", 0)
        settled.append(steps.settled)
    assert (steps.steps, steps.training_steps) == (5, 5)
    assert settled == [False, False, True, True, True]


def test_neither_bytes_nor_retries_of_operators_that_are_measured_are_the_steps():
    meter, steps = metered(1)
    for _ in range(3):
        train(steps, meter)
    steps.forward_begins()
    steps.interrupt()
    meter.allocate(0, 900)
    meter.retries += 2
    steps.resume()
    steps.optimizer_ended("SGD", 0)
    assert (steps.peak_bytes, steps.retries) == (150, 0)
    steps.forward_begins()
    meter.retries += 1
    steps.optimizer_ended("SGD", 0)
    assert steps.retries == 1


def test_what_a_capture_takes_for_a_moment_is_not_the_steps():
    meter, steps = metered(1)
    steps.forward_begins()
    meter.allocate(0, 900)  # Dynamo's trace
    with steps.capturing():
        meter.allocate(20, 800)
        meter.retries += 1
    steps.call_begins()
    meter.allocate(0, 50)
    steps.call_ended(FORWARD, 0)
    meter.allocate(0, 120)  # between two graphs
    with steps.capturing():
        meter.allocate(0, 700)
    steps.optimizer_ended("SGD", 0)
    assert (steps.peak_bytes, steps.retries) == (140, 0)


def test_operators_that_are_measured_within_a_capture_interrupt_the_step_once():
    meter, steps = metered(1)
    steps.forward_begins()
    meter.allocate(0, 900)
    with steps.capturing():
        meter.allocate(0, 800)
        steps.interrupt()
        meter.retries += 2
        steps.resume()
        meter.retries += 1
    meter.allocate(0, 50)
    steps.optimizer_ended("SGD", 0)
    assert (steps.peak_bytes, steps.retries) == (50, 0)


def test_what_another_optimizer_steps_with_alone_is_no_training_steps():
    """Of a model that the script trains without a forward, say: its gradients are made up."""
    meter, steps = metered(1)
    train(steps, meter)
    meter.allocate(0, 500)
    steps.optimizer_ended("SGD", 0)
    assert (steps.steps, steps.peak_bytes) == (1, 150)
    steps.measure_a_settled_step(2)
    train(steps, meter)
    meter.allocate(0, 300)  # the second of two that follow each backward
    steps.optimizer_ended("SGD", 0)
    assert (steps.steps, steps.peak_bytes) == (2, 300)


def test_a_step_with_several_optimizers_is_settled_only_when_all_of_them_have_stepped():
    """Another plan takes effect then: within a step, some forwards have run under the one before."""
    meter, steps = metered(2)
    settled = []
    for _ in range(8):
        train(steps, meter)
        settled.append(steps.settled)
    assert settled == [False, False, False, False, False, True, False, True]


def test_a_plan_that_begins_within_a_step_leaves_the_steps_where_they_are():
    meter, steps = metered(2)
    train(steps, meter)
    steps.measure_a_settled_step(2)
    settled = []
    for _ in range(6):
        train(steps, meter)
        settled.append(steps.settled)
    assert settled == [False, False, False, False, True, False]


def test_a_step_in_which_operators_are_measured_is_left_out():
    meter, steps = metered(1)
    for _ in range(2):
        train(steps, meter)
    steps.forward_begins()
    meter.allocate(0, 30)
    steps.interrupt()
    meter.allocate(0, 10**6)  # not the step's
    steps.resume()
    train(steps, meter)
    assert steps.stretches == ()
    assert steps.peak_bytes == 150
    train(steps, meter)
    assert len(steps.stretches) == 6


def test_nothing_is_measured_in_detail_where_bytes_are_not_counted_exactly():
    meter = Allocated()
    meter.exact = False
    steps = StepMeter(meter)
    steps.measure_a_settled_step(1)
    for _ in range(5):
        train(steps, meter)
    assert steps.stretches == ()


def test_peaks_are_of_the_plan_that_had_the_most_until_they_are_forgotten():
    steps = StepMeter(Allocated())
    for plan in ((10, 20), (8, 25)):
        steps.plan_is(*plan)
    assert steps.most_planned == (10, 25)
    steps.forget_peaks()
    assert steps.most_planned == (8, 25)
    steps.plan_is(7, 7)
    assert steps.most_planned == (8, 25)


def test_retries_between_settled_steps_are_no_steps():
    meter, steps = metered(1)
    for retried in (0, 0, 0, 3, 2):
        meter.retries += retried  # in evaluation, before the step
        train(steps, meter)
    assert steps.retries == 0


def test_a_step_that_the_script_has_left_counts_for_nothing():
    meter, steps = metered(1)
    for _ in range(3):
        train(steps, meter)
    steps.forward_begins()
    meter.allocate(0, 900)
    steps.interrupt()
    steps.resume()
    steps.step_left()
    train(steps, meter)
    assert (steps.steps, steps.peak_bytes) == (4, 150)
