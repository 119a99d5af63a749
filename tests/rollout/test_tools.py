"""Tools: what is a call, what answers it, and what the calculator refuses."""

import asyncio
import threading

import pytest

from minirl.rollout.tools import (
    calculator,
    call_tool,
    extract_tool_calls,
    function_tool,
    load_function_tools,
    truncate,
)


def call(name: str, arguments, tools=(calculator,), length: int = 256, side: str = "left") -> str:
    by_name = {tool.name: tool for tool in tools}
    return asyncio.run(call_tool(by_name, name, arguments, length=length, side=side))


@pytest.mark.parametrize(
    ("expression", "answer"),
    [("3+4", "7"), ("2*(3-10)", "-14"), ("-3 - -4", "1"), ("7/2", "3.5"), ("8/2", "4"), ("0.5*4", "2")],
)
def test_calculator_computes(expression, answer):
    assert call("calculator", {"expression": expression}) == answer


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "2**9**9", "abs(3)", "x+1", "'a'*9", "True+1", "(1).real", "[1]"]
)
def test_calculator_refuses_what_is_not_plus_minus_times_divide(expression):
    answer = call("calculator", {"expression": expression})
    assert answer.startswith("Error executing tool 'calculator': cannot compute")


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("calculator", {"expression": "1/0"}, "Error executing tool 'calculator': division by zero"),
        ("calculator", {"formula": "1+1"}, "Error executing tool 'calculator':"),
        ("calculator", "1+1", "Error executing tool 'calculator':"),
        ("calculator", {"expression": "1+"}, "Error executing tool 'calculator': invalid syntax"),
        ("search", {"query": "x"}, "Unknown function 'search'. Available tools: ['calculator']"),
    ],
)
def test_a_mistake_is_the_tools_answer(name, arguments, says):
    assert call(name, arguments).startswith(says)


def test_calls_are_found_in_order_and_malformed_ones_left_out():
    text = (
        'so <tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call> and\n'
        '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'
        '<tool_call>{"name": "c"}</tool_call><tool_call>{name: d}</tool_call><tool_call>7</tool_call>'
        '<tool_call>{"name": "e", "arguments": {}}'
    )
    assert extract_tool_calls(text) == [("a", {"x": 1}), ("b", {})]
    assert extract_tool_calls("#### 7") == []


def test_schema_comes_from_signature_and_docstring():
    function = calculator.tool_schema["function"]
    assert function["name"] == calculator.name == "calculator"
    assert function["parameters"]["properties"]["expression"]["type"] == "string"
    assert function["parameters"]["required"] == ["expression"]


def test_plain_functions_run_in_a_thread_and_coroutines_in_the_loop():
    @function_tool
    def plain() -> dict:
        """Where it runs."""
        return {"main": threading.current_thread() is threading.main_thread()}

    @function_tool
    async def coroutine() -> bool:
        """Where it runs."""
        return threading.current_thread() is threading.main_thread()

    assert call("plain", {}, [plain, coroutine]) == '{"main": false}'
    assert call("coroutine", {}, [plain, coroutine]) == "true"


def test_tools_are_loaded_from_the_users_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from minirl.rollout.tools import calculator, function_tool\n"
        "def helper(): ...\n"
        "@function_tool\n"
        "def double(x: int) -> int:\n"
        '    """Twice.\n\n    Args:\n        x: a number\n    """\n'
        "    return 2 * x\n"
    )
    tools = load_function_tools(str(file))
    assert [tool.name for tool in tools] == ["calculator", "double"]
    assert call("double", {"x": 21}, tools) == "42"
    assert [tool.name for tool in load_function_tools(None)] == ["calculator"]
    with pytest.raises(ValueError, match=r"function_tool_path=nowhere\.py: no such file"):
        load_function_tools("nowhere.py")
    file.write_text("x = 1")
    with pytest.raises(ValueError, match="no tool in it"):
        load_function_tools(str(file))


def test_long_answers_are_cut_where_the_side_says():
    text = "0123456789"
    assert truncate(text, 10, "left") == text
    assert truncate(text, 4, "left") == "(truncated)...6789"
    assert truncate(text, 4, "right") == "0123...(truncated)"
    assert truncate(text, 4, "middle") == "01...(truncated)...89"
    assert truncate(text, 1, "middle") == "...(truncated)..."
    assert call("calculator", {"expression": "10*10"}, length=2) == "(truncated)...00"
    assert call("calculator", {"expression": "1/0"}, length=2).endswith(
        "division by zero"
    )  # a mistake is not
