"""Budget of chat templates: the maximum work of one rendering, counted in steps and not timed, so that it is a pure
function.

A template is code that comes with a model, with variables that a request sets. Each turn of a loop and each call of a
macro, function, filter or operator is a step, and text and lists count by their length before they are made.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final

import jinja2
from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_LENGTH: Final = 2**24
"""Longest text or list that a template may make."""

MAX_WIDTH: Final = 10_000
"""Largest width that a template may pad, indent or wrap to."""

MAX_BITS: Final = 4096
"""Most bits of an integer."""

CHARS_PER_STEP: Final = 16  # characters that are copied
COMPARED_PER_STEP: Final = 64  # characters that are compared

_TICK, _MADE, _TEXT, _WEIGHED = "-tick", "-made", "-text", "-weighed"
"""Filters that no template can name."""

_WITH_WIDTH: Final = frozenset({"center", "indent", "wordwrap", "truncate", "batch", "slice", "round", "tojson"})
_PADDING: Final = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes"})
_SHALLOW: Final = frozenset(
    {"attr", "batch", "count", "d", "default", "first", "float", "int", "items", "last", "length", "list", "map"}
    | {"random", "reject", "rejectattr", "reverse", "round", "select", "selectattr", "slice"}
)
"""Filters that look at a list's items one by one, if at all."""

_COMPARING: Final = frozenset({"==", "!=", "eq", "ne", "equalto", "in", "<", ">", "<=", ">=", "lt", "gt", "le", "ge"})
_WIDE: Final = re.compile(r"%[^%a-zA-Z]*(\d{5}|\*)|\{[^{}]*(\d{5}|:[^{}]*\{)")
"""A format that pads to a large width, or to the width of an argument."""


class BudgetExceededError(jinja2.TemplateRuntimeError):
    """The template does more than it may."""


class Budget:
    """The steps that are left of one rendering."""

    __slots__ = ("_most", "left")

    def __init__(self, steps: int) -> None:
        self._most = self.left = steps

    def spend(self, steps: int) -> None:
        """Raises `BudgetExceededError` when nothing is left."""
        self.left -= steps
        if self.left < 0:
            raise BudgetExceededError(f"it was stopped after {self._most} steps (loops, calls, and the text they make)")

    def spend_text(self, length: int) -> None:
        """Charges a text, or a list, of that length."""
        if length > MAX_LENGTH:
            raise BudgetExceededError(f"it makes a text or list of length {length}; the maximum is {MAX_LENGTH}")
        self.spend(1 + length // CHARS_PER_STEP)

    def spend_parts(self, value: object, chars_per_step: int = 0) -> int:
        """Charges each item in a tree of lists and mappings, as often as it is there, and the texts in them.

        Returns the number of characters, if `chars_per_step` says that they count.
        """
        pending, num_chars = [value], 0
        while pending:
            item = pending.pop()
            kind = type(item)
            if kind is str:
                num_chars += len(item)  # type: ignore[arg-type]
                self.spend(1 + len(item) // chars_per_step if chars_per_step else 1)  # type: ignore[arg-type]
            elif isinstance(item, Mapping):
                self.spend(1 + len(item))
                pending += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple, set, frozenset)):
                self.spend(1 + len(item))
                pending += item
            elif isinstance(item, (str, bytes, range)):
                num_chars += len(item)
                self.spend(1 + len(item) // (chars_per_step or 1))
            elif kind is Namespace and chars_per_step:
                raise BudgetExceededError("it writes a namespace as text")
            else:
                self.spend(1)
        return num_chars


_BUDGET: Final = ContextVar[Budget]("_BUDGET")


@contextmanager
def spending(steps: int) -> Iterator[None]:
    """Maximum number of steps of nested templates together."""
    token = _BUDGET.set(Budget(steps))
    try:
        yield
    finally:
        _BUDGET.reset(token)


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """Renders inside `spending` alone."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        """`filters` come beside jinja2's own, or in their place."""
        super().__init__(**options, finalize=_finalized)
        del self.globals["lipsum"]  # of random text
        self.filters = {name: _bounded_filter(name, func) for name, func in {**self.filters, **filters}.items()}
        self.filters |= {_TICK: _tick, _MADE: _made, _TEXT: _finalized, _WEIGHED: _weighed}
        tests: dict[str, Any] = self.tests
        self.tests = {name: _bounded_test(func) if name in _COMPARING else func for name, func in tests.items()}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Puts a step into each loop and macro, and before what makes or compares values without a call."""
        _note_steps(source, self)
        return super()._generate(source, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(_BUDGET.get(), operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `format_map`, which the sandbox has in its own way."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(_BUDGET.get(), value.__self__, [*args, *kwargs.values()])
            return formatted(*args, **kwargs)

        return bounded

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        budget.spend(1)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, (str, bytes, int, float)):
            args = _check_method(budget, obj.__name__, owner, args, kwargs)
        return _charged(budget, super().call(context, obj, *args, **kwargs))


def _note_steps(source: nodes.Template, environment: jinja2.Environment) -> None:
    repeated: list[Any] = [*source.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]
    for node in repeated:
        size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_call(_TICK, nodes.Const(size), node), lineno=node.lineno))
    for loop in source.find_all(nodes.For):
        if loop.test is not None:
            loop.test = nodes.And(_call(_TICK, nodes.Const(0), loop), loop.test, lineno=loop.lineno)
    for comparison in list(source.find_all(nodes.Compare)):
        comparison.expr = _call(_WEIGHED, comparison.expr, comparison)
        for operand in comparison.ops:
            operand.expr = _call(_WEIGHED, operand.expr, comparison)
    for joined in list(source.find_all(nodes.Concat)):
        joined.nodes = [_call(_TEXT, part, joined) for part in joined.nodes]
    for parent in [source, *source.find_all(nodes.Node)]:
        _wrap_children(parent)
    source.set_environment(environment)


def _wrap_children(parent: nodes.Node) -> None:
    """Wraps the nodes that make a list, a mapping or a slice, so that they are charged."""
    for name, value in list(parent.iter_fields()):
        if isinstance(value, list):
            value[:] = [_charging(parent, item) for item in value]
        else:
            setattr(parent, name, _charging(parent, value))


def _charging(parent: nodes.Node, node: Any) -> Any:
    return _call(_MADE, node, node) if isinstance(node, nodes.Expr) and _makes(parent, node) else node


def _makes(parent: nodes.Node, node: nodes.Expr) -> bool:
    if isinstance(parent, nodes.Filter) and parent.name == _MADE:
        return False
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Slice)
    is_made = isinstance(node, (nodes.List, nodes.Dict)) or (isinstance(node, nodes.Tuple) and node.ctx == "load")
    return is_made and not all(isinstance(one, nodes.Const) for one in node.iter_child_nodes())


def _call(name: str, value: nodes.Expr, near: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=near.lineno)


@pass_context
def _tick(context: Context, num_chars: int) -> bool:
    _BUDGET.get().spend(1 + num_chars // CHARS_PER_STEP)
    return True


@pass_context
def _made(context: Context, value: Any) -> Any:
    return _charged(_BUDGET.get(), value)


@pass_context
def _weighed(context: Context, value: Any) -> Any:
    budget = _BUDGET.get()
    if type(value) is str:
        budget.spend(1 + len(value) // COMPARED_PER_STEP)
    else:
        budget.spend_parts(value, COMPARED_PER_STEP)
    return value


@pass_context
def _finalized(context: Context, value: Any) -> Any:
    """The value as it is written out."""
    budget = _BUDGET.get()
    if isinstance(value, str):
        budget.spend_text(len(value))
    else:
        budget.spend_parts(value, CHARS_PER_STEP)
    return value


def _charged(budget: Budget, value: Any) -> Any:
    if isinstance(value, (str, bytes)):
        budget.spend_text(len(value))
    elif isinstance(value, (list, tuple, dict, set, frozenset)):
        budget.spend_parts(value)
    return value


def _bounded_filter(name: str, func: Callable[..., Any]) -> Callable[..., Any]:
    leading = _leading(func)

    @pass_context
    @wraps(func)
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        value = _check_filter(budget, name, value, args, kwargs)
        return _charged(budget, func(*leading(context), value, *args, **kwargs))

    return bounded


def _bounded_test(func: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    @wraps(func)
    def bounded(context: Context, *args: Any) -> Any:
        for arg in args:
            _weighed(context, arg)
        return func(*args)

    return bounded


def _leading(func: Callable[..., Any]) -> Callable[[Context], tuple[Any, ...]]:
    """The arguments that jinja2 passes to a filter before its value."""
    kind = getattr(func, "jinja_pass_arg", None)
    name = None if kind is None else kind.name
    if name == "context":
        return lambda context: (context,)
    if name == "eval_context":
        return lambda context: (context.eval_ctx,)
    return (lambda context: (context.environment,)) if name == "environment" else lambda context: ()


def _check_filter(budget: Budget, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value, as a list where it could be looked at once alone."""
    given = [*args, *kwargs.values()]
    if name in _WITH_WIDTH:
        _check_widths(name, given)
    if name == "format":
        _check_format(budget, value, given)
    elif name == "join":
        value = list(value)
        _check_join(budget, given[0] if given else "", value)
    elif name == "replace":
        _check_replace(budget, str(value), given)
    elif name == "sum" and given and not all(isinstance(one, (int, float, str)) for one in given):
        value = list(value)
        budget.spend(budget.spend_parts(value) + len(value) ** 2)
    elif name not in _SHALLOW:
        budget.spend_parts(value, CHARS_PER_STEP)
    elif hasattr(value, "__len__"):
        budget.spend(1 + len(value) // (COMPARED_PER_STEP if isinstance(value, str) else 1))
    return value


def _check_operands(budget: Budget, operator: str, left: Any, right: Any) -> None:
    budget.spend(1)
    if operator == "%" and isinstance(left, (str, bytes)):
        _check_format(budget, left, [right])
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        budget.spend_text(len(left) + len(right))
    elif operator == "*":
        for one, times in ((left, right), (right, left)):
            if hasattr(one, "__len__") and isinstance(times, int):
                budget.spend_text(len(one) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise BudgetExceededError(f"it computes an integer of about {bits} bits; the maximum is {MAX_BITS}")


def _check_method(
    budget: Budget, name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments, as lists where they could be looked at once alone."""
    given = [*args, *kwargs.values()]
    if name in _PADDING:
        _check_widths(name, given)
    elif name == "join" and len(args) == 1:
        args = (list(args[0]),)
        _check_join(budget, owner, args[0])
    elif name == "replace":
        _check_replace(budget, owner, given)
    elif name == "translate":
        raise BudgetExceededError("it calls translate, which is not allowed")
    if isinstance(owner, (str, bytes)):
        budget.spend(len(owner) // CHARS_PER_STEP)
    return args


def _check_widths(name: str, given: Iterable[Any]) -> None:
    for one in given:
        width = len(one) if isinstance(one, (str, bytes)) else one
        if isinstance(width, int) and abs(width) > (100 if name == "round" else MAX_WIDTH):
            raise BudgetExceededError(f"it calls {name} with a width of {width}, which exceeds the limit of the budget")


def _check_format(budget: Budget, pattern: Any, given: list[Any]) -> None:
    text = str(pattern)
    if _WIDE.search(text):
        raise BudgetExceededError(
            f"it formats to a width of more than {MAX_WIDTH - 1}, or to a width that is not a literal"
        )
    num_chars = budget.spend_parts(given, CHARS_PER_STEP)
    budget.spend_text(len(text) + (text.count("%") + text.count("{")) * num_chars)


def _check_join(budget: Budget, separator: Any, items: list[Any]) -> None:
    num_chars = budget.spend_parts(items, CHARS_PER_STEP)
    budget.spend_text(num_chars + len(str(separator)) * len(items))


def _check_replace(budget: Budget, text: Any, given: list[Any]) -> None:
    if len(given) >= 2 and isinstance(given[0], type(text)) and isinstance(given[1], type(text)):
        budget.spend_text(len(text) + text.count(given[0]) * len(given[1]))
