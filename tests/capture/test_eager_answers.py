"""Code that asks whether it is being compiled computes what it computes in eager."""

import functools
import importlib.util
import logging
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.capture.eager_answers import eager_answers

QUESTIONS = {
    "torch.compiler.is_compiling": lambda: torch.compiler.is_compiling(),
    "torch.compiler.is_dynamo_compiling": lambda: torch.compiler.is_dynamo_compiling(),
    "torch._dynamo.is_compiling": lambda: torch._dynamo.is_compiling(),
    "torch._utils.is_compiling": lambda: torch._utils.is_compiling(),
}


def traced(question, x):
    torch._dynamo.reset()
    return torch.compile(lambda x: x * 2 if question() else x * 3, backend="eager", fullgraph=True)(x)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_script_that_asks_whether_it_is_compiled_gets_eagers_answer(name):
    x = torch.ones(2)
    with eager_answers():
        assert traced(QUESTIONS[name], x).tolist() == [3.0, 3.0]
    # what the script compiles itself is answered as ever
    assert traced(QUESTIONS[name], x).tolist() == [2.0, 2.0]


def test_torchs_own_code_is_answered_as_compiled():
    asks = types.FunctionType((lambda x: x * 2 if torch.compiler.is_compiling() else x * 3).__code__, vars(F))
    torch._dynamo.reset()
    with eager_answers():
        assert torch.compile(asks, backend="eager", fullgraph=True)(torch.ones(1)).tolist() == [2.0]


# Dynamo imports a module whose name it meets
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_code_with_a_way_of_its_own_for_tracing_is_answered_as_compiled_where_it_asks_a_helper():
    asking = types.ModuleType("transformers.utils.output_capturing")
    exec("def asks(x):\n    return x * 2 if helper() else x * 3", vars(asking))
    asking.helper = QUESTIONS["torch.compiler.is_compiling"]
    torch._dynamo.reset()
    with eager_answers():
        assert torch.compile(asking.asks, backend="eager", fullgraph=True)(torch.ones(1)).tolist() == [2.0]


class Asks(nn.Module):
    def forward(self, x):
        return x * 2 if torch.compiler.is_compiling() else x * 3


def test_a_scripts_module_that_torchs_own_code_calls_gets_eagers_answer():
    torch._dynamo.reset()
    with eager_answers():
        model = torch.compile(nn.Sequential(nn.Identity(), Asks()), backend="eager", fullgraph=True)
        assert model(torch.ones(1)).tolist() == [3.0]


@pytest.mark.skipif(not hasattr(torch.xpu, "is_current_stream_capturing"), reason="torch does not have it")
def test_whether_another_kind_of_device_captures_a_stream_can_be_asked():
    x = torch.ones(1)
    with eager_answers():
        assert traced(torch.xpu.is_current_stream_capturing, x).tolist() == [3.0]
        torch._dynamo.trace_rules.clear_lru_cache()  # as each new process group does
        assert traced(torch.xpu.is_current_stream_capturing, x).tolist() == [3.0]


def test_calls_of_a_logger_that_log_nothing_more_do_not_break_a_graph(caplog):
    """As transformers' ``warning_once``: the same words are logged once in a process."""
    logger = logging.getLogger("test_eager_answers")
    logger.setLevel(logging.WARNING)

    class Logger(logging.Logger):
        warning_once = functools.lru_cache(None)(logging.Logger.warning)

    logger.__class__ = Logger

    def program(x):
        logger.debug("not logged at this level")
        logger.warning_once("%s %s", "logged", "once")
        return x * 3

    x = torch.ones(2)
    with eager_answers():
        for _ in range(2):
            torch._dynamo.reset()
            assert torch.compile(program, backend="eager", fullgraph=True)(x).tolist() == [3.0, 3.0]
        own = [record.getMessage() for record in caplog.records if record.name == logger.name]
        assert own == ["logged once"]
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Logger"):  # logged in every call
            torch.compile(lambda x: logger.warning("again") or x, backend="eager", fullgraph=True)(x)
