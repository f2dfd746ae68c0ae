"""Recognises the symbolic sizes of an export, which torch evaluates with sympy, so that no other code is evaluated.

torch writes them as nested calls, such as Mul(Integer(2), Symbol('s77', positive=True, integer=True)).
"""

from __future__ import annotations

import ast
import re
from typing import Any

CHARACTERS = re.compile(r"[\w ,.()'=+\-*/%<>!]{1,20000}", re.ASCII)
LONG_NUMBER = re.compile(r"\d{30}|\de[+-]?\d{4}", re.IGNORECASE)  # takes memory when it is evaluated
SYMBOL = re.compile(r"[a-z_]+\d+")
TEXT = re.compile(r"[A-Za-z_]\w{0,40}|[+-]?[\d.]{1,30}(?:e[+-]?\d{1,3})?")  # a symbol's name, or a number
LARGEST_POWER = 64
POWERS = {"Pow", "PowByNatural", "FloatPow", "LShift", "RShift"}
FUNCTION = re.compile(
    r"Integer|Float|Rational|Symbol|Add|Mul|Mod|Min|Max|Abs|floor|ceiling|And|Or|Not|Equality|Unequality|Eq|Ne|Lt|Le|Gt|"
    r"Ge|StrictLessThan|StrictGreaterThan|LessThan|GreaterThan|Piecewise|ExprCondPair|FloorDiv|ModularIndexing|Where|"
    r"PythonMod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator|"
    r"TruncToFloat|TruncToInt|RoundToInt|RoundDecimal|ToFloat|Identity|OpaqueUnaryFn_\w+"
)
ARITHMETIC = ast.Add | ast.Sub | ast.Mult | ast.Div | ast.FloorDiv | ast.Mod


def is_size_formula(text: Any) -> bool:
    """Whether a text is a formula of symbols, numbers, arithmetic and functions such as Min, Max and floor.

    >>> is_size_formula("Mul(Integer(2), Symbol('s77', positive=True, integer=True))"), is_size_formula("2*s0 + 1")
    (True, True)
    >>> is_size_formula("__import__('os').system('id')"), is_size_formula("9**9**9")
    (False, False)
    """
    if not isinstance(text, str) or not CHARACTERS.fullmatch(text) or LONG_NUMBER.search(text):
        return False
    try:
        return _allowed(ast.parse(text, mode="eval").body, power=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _allowed(node: ast.expr, power: bool) -> bool:
    """Whether a part of a formula is allowed; `power`: whether it is inside a power, which may not be nested."""
    match node:
        case ast.Constant(value=str() as text):
            return TEXT.fullmatch(text) is not None
        case ast.Constant(value=int() | float()):
            return True
        case ast.Name(id=name):
            return SYMBOL.fullmatch(name) is not None
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _allowed(operand, power)
        case ast.BinOp(left=left, op=ast.Pow(), right=exponent):
            return not power and _is_small(exponent) and _allowed(left, power=True)
        case ast.BinOp(left=left, op=operation, right=right):
            return isinstance(operation, ARITHMETIC) and _allowed(left, power) and _allowed(right, power)
        case ast.Compare(left=left, comparators=others):
            return all(_allowed(part, power) for part in (left, *others))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            if name not in POWERS and not FUNCTION.fullmatch(name):
                return False
            if not all(k.arg and isinstance(k.value, ast.Constant) and _is_small(k.value) for k in keywords):
                return False
            if name in POWERS and (power or len(arguments) != 2 or not _is_small(arguments[1])):
                return False
            return all(_allowed(part, power or name in POWERS) for part in arguments)
    return False


def _is_small(node: ast.expr) -> bool:
    """Whether an exponent or an option is a number up to LARGEST_POWER."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return abs(number) <= LARGEST_POWER
        case ast.Constant(value=str() as text):  # of Float('0.5')
            return re.fullmatch(r"[+-]?\d?\d?(\.\d*)?", text) is not None
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _is_small(operand)
        case ast.Call(func=ast.Name(id="Integer" | "Float" | "Rational"), args=arguments):
            return all(_is_small(part) for part in arguments)
    return False
