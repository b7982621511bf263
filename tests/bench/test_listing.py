"""Loops of hand-written control flow."""

from bench.kernels.listing import Function, Instruction, innermost_loops


def code(*lines: str) -> Function:
    """`label:` lines and instructions: `mma`, `add`, `wait`, `jump L` (always), `maybe L` (perhaps), `exit`."""
    function = Function("toy")
    for line in lines:
        if line.endswith(":"):
            function.labels[line[:-1]] = len(function.instructions)
            continue
        op, _, target = line.partition(" ")
        unit = {"mma": "tensor", "wait": "sync", "jump": "branch", "maybe": "branch", "exit": "branch"}.get(
            op, "integer"
        )
        falls = op not in ("jump", "exit")
        function.instructions.append(Instruction(op, target, unit, jumps=target or None, falls=falls))
    return function


def members(function: Function) -> list[list[int]]:
    return [list(loop.members) for loop in innermost_loops(function)]


def test_a_plain_loop_is_its_lines():
    assert members(code("add", "L:", "mma", "add", "maybe L", "exit")) == [[1, 2, 3]]


def test_no_matrix_instruction_no_loop():
    assert members(code("L:", "add", "maybe L", "mma", "exit")) == []


def test_only_the_innermost_loop_counts():
    assert members(code("A:", "mma", "B:", "mma", "maybe B", "maybe A", "exit")) == [[1, 2]]
    # an inner loop without a product does not hide the outer one, whose lines include it
    assert members(code("A:", "mma", "B:", "add", "maybe B", "maybe A", "exit")) == [[0, 1, 2, 3]]


def test_the_way_back_from_a_spin_behind_the_function_is_no_loop():
    """`spin` jumps backward into the middle of the second loop; the first one must not be swallowed."""
    function = code(
        "A:", "mma", "maybe A", "B:", "wait", "maybe spin", "back:", "mma", "add", "maybe B", "exit",
        "spin:", "wait", "maybe spin", "jump back",
    )  # fmt: skip
    assert members(function) == [[0, 1], [2, 3, 4, 5, 6]]


def test_a_loop_entered_in_its_middle_by_a_rotated_jump():
    """LLVM puts the latch first and enters by a jump over it."""
    function = code("jump head", "latch:", "add", "maybe out", "head:", "mma", "jump latch", "out:", "exit")
    assert members(function) == [[1, 2, 3, 4]]


def test_a_branch_inside_a_loop_belongs_to_it():
    function = code("L:", "maybe skip", "mma", "jump join", "skip:", "add", "join:", "add", "maybe L", "exit")
    assert members(function) == [[0, 1, 2, 3, 4, 5]]


def test_unreachable_lines_do_no_harm():
    assert members(code("L:", "mma", "maybe L", "exit", "T:", "mma", "jump T")) == [[0, 1]]
