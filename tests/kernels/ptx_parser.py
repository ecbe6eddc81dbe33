"""The statements, labels and shared variables of a kernel's PTX."""

import re
from functools import cache


def parse(ptx):
    """-> ([(guard is negated, guard or None, words of the operation, operands)], label -> index, {a shared variable:
    (address, bytes)}).

    Variables lie before dynamic shared memory, whose address is the one of `global_smem`.
    """
    body = ptx[ptx.index(".entry") :]
    body = body[body.index("\n{") + 2 :].partition(".section")[0]
    body = re.sub(r"//[^\n]*", "", body)
    variables, end = {}, 0
    for align, name, size in re.findall(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];", body):
        assert name not in variables, f"{name} is declared again"
        end = -(-end // int(align)) * int(align)
        variables[name] = end, int(size)
        end += int(size)
    variables["global_smem"] = -(-end // 16) * 16, 0
    body = re.sub(r"\.shared [^;]*;", "", body)
    body = re.sub(r"\n\s*\.(loc|file|pragma|reg)[^\n]*", "\n", body)
    lines, labels = [], {}
    for statement in re.split(r";|(?<=:)\s*\n", body):
        s = statement.strip()
        # Braces are scopes, or at the start of a statement the operands of one.
        while s[:1] == "}" or (s[:1] == "{" and not re.match(r"\{\s*%", s)):
            s = s[1:].strip()
        s = re.sub(r"^\.reg[^\n]*\n?", "", s).strip()
        while m := re.match(r"^([$\w]+):\s*", s):
            labels[m[1]] = len(lines)
            s = s[m.end() :].strip()
        s = s.strip("{} \n\t") if s in "{}" else s
        if not s or s.startswith(".reg"):
            continue
        m = re.match(r"(?:@(!?)([%\w]+)\s+)?([\w.:]+)\s*(.*)", s, re.S)
        lines.append((m[1] == "!", m[2], m[3].split("."), _operands(m[4])))
    return lines, labels, variables


def _operands(text):
    out, depth, at = [], 0, ""
    for c in text.strip():
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            out.append(at.strip())
            at = ""
        else:
            at += c
    return [*out, at.strip()] if at.strip() else out


@cache
def number_of(a):
    """The bits of a literal operand, or None."""
    if re.fullmatch(r"0[fhb][0-9A-Fa-f]+", a):
        return int(a[2:], 16)
    return int(a.rstrip("U"), 0) if re.fullmatch(r"-?(0x)?[0-9A-Fa-f]+U?", a) else None


@cache
def place_of(a):
    """(name, offset) of an address."""
    m = re.match(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", a)
    return m[1], int(m[2] or 0)


@cache
def names_of(a):
    return [n.strip() for n in a.strip("{} \n\t").split(",")]
