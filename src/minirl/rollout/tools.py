"""Tools: Python functions that a model may call by writing their name and arguments.

In:  the text of a turn -> Out: the calls in it; a call -> the text that answers it.
Simplified: stateless functions only, calls in Hermes form only; verl also has tools with a life cycle
(BaseTool) and a parser per model family.
verl: verl.tools.function_tool, verl.experimental.agent_loop.tool_parser:HermesToolParser
"""

import ast
import asyncio
import inspect
import json
import operator
import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import get_json_schema

TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


@dataclass(frozen=True)
class FunctionTool:
    """verl: verl.tools.function_tool:FunctionTool"""

    name: str
    fn: Callable[..., Any]
    tool_schema: dict  # what the chat template shows the model

    async def call(self, parameters: dict[str, Any]) -> Any:
        """A plain function runs in a thread, so that other rows go on meanwhile."""
        if inspect.iscoroutinefunction(self.fn):
            return await self.fn(**parameters)
        return await asyncio.to_thread(self.fn, **parameters)


def function_tool(fn: Callable[..., Any]) -> FunctionTool:
    """Decorator. Type hints and a Google-style docstring with an Args block are needed: they make the schema.

    verl: verl.tools.function_tool:function_tool
    """
    return FunctionTool(fn.__name__, fn, get_json_schema(fn))


def load_function_tools(path: str | None) -> list[FunctionTool]:
    """The tools of a Python file, in its order; without a file the calculator alone.

    Raises:
        ValueError: no such file, or no tool in it.
    verl: verl.tools.function_tool:load_function_tools_from_path
    """
    if path is None:
        return [calculator]
    key = f"actor_rollout_ref.rollout.multi_turn.function_tool_path={path}"
    if not Path(path).is_file():
        raise ValueError(f"{key}: no such file; give the path of a .py file")
    tools = [value for value in runpy.run_path(path).values() if isinstance(value, FunctionTool)]
    if not tools:
        raise ValueError(f"{key}: no tool in it; decorate a function with minirl.rollout.tools.function_tool")
    return tools


def extract_tool_calls(text: str) -> list[tuple[str, Any]]:
    """(name, arguments) of every well-formed `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    A malformed call is left out, as in verl: a turn without calls is the last, and its score tells the model.
    verl: verl.experimental.agent_loop.tool_parser:HermesToolParser.extract_tool_calls
    """
    calls = []
    for body in TOOL_CALL.findall(text):
        try:
            call = json.loads(body)
            calls.append((call["name"], call["arguments"]))
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return calls


async def call_tool(
    tools: dict[str, FunctionTool], name: str, arguments: Any, *, length: int, side: str
) -> str:
    """The tool's answer as text, truncated. Mistakes, the model's or the tool's, are answered, not raised.

    As in verl, the text of a mistake is never truncated.

    verl: verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop._call_tool
    """
    if name not in tools:
        return f"Unknown function '{name}'. Available tools: {list(tools)}"
    try:
        answer = await tools[name].call(arguments)
    except Exception as error:  # whatever the tool raises: the model reads it and may try again
        return f"Error executing tool '{name}': {error}"
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return truncate(text, length, side)


def truncate(text: str, length: int, side: str) -> str:
    """`text`, cut to `length` characters with a mark where characters are missing: left, right or middle."""
    if len(text) <= length:
        return text
    if side == "left":
        return "(truncated)..." + text[-length:]
    if side == "right":
        return text[:length] + "...(truncated)"
    half = length // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]


@function_tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / and parentheses, for example (3+4)*2.
    """
    value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value)) if value == int(value) else str(value)


def _evaluate(node: ast.AST) -> float:
    """Numbers and the six operations; never eval, as the text is the model's."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_evaluate(node.operand))
    raise ValueError(f"cannot compute {ast.unparse(node)}: use numbers with + - * / and parentheses")
