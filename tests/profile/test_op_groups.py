"""OpGroups: every instruction finds its part of the model, whatever the compiler has left of its name."""

import pytest
from engines import make_engine
from tiny_model import make_tiny_model

from jpaged.profile.op_groups import GROUPS, OpGroups, scope_of

TEXT = """HloModule jit_step, is_scheduled=true

%fused.1 (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %a = f32[4,8]{1,0} add(%p, %p), metadata={op_name="jit(step)/while/body/mlp/add"}
  ROOT %m = f32[4,8]{1,0} multiply(%a, %p), metadata={op_name="jit(step)/while/body/mlp/mul"}
}

%branch (b: (f32[4,8])) -> (f32[4,8]) {
  %b = (f32[4,8]{1,0}) parameter(0)
  %inside = f32[4,8]{1,0} get-tuple-element(%b), index=0
  ROOT %copied = (f32[4,8]{1,0}) copy(%inside)
}

ENTRY %main.1 (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %dot.3 = f32[4,8]{1,0} dot(%x, %x), metadata={op_name="jit(step)/qkv/rope/dot_general" stack_frame_id=1}
  %ynn_fusion.2 = f32[4,8]{1,0} fusion(%x), kind=kCustom, calls=%fused.1
  %copy.7 = f32[4,8]{0,1} copy(%dot.3)
  %bitcast.8 = f32[32]{0} bitcast(%copy.7)
  %cond.4 = (f32[4,8]{1,0}) conditional(%x, %x), branch_computations={%branch, %branch}, metadata={op_name="jit(step)/sample/cond"}
  %custom = f32[4,8]{1,0} custom-call(%x), custom_call_target="f"
  ROOT %add.9 = f32[4,8]{1,0} add(%x, %x), metadata={op_name="jit(step)/jit(sample)/add"}
}
"""


@pytest.mark.parametrize(
    "instruction, group",
    [
        ("dot.3", "rope"),  # the innermost scope
        ("ynn_fusion.2", "mlp"),  # what was fused into it
        ("bitcast.8", "rope"),  # what it reads, two steps away
        ("cond.4", "sample"),
        ("copied", "sample"),  # the branch that it stands in
        ("add.9", None),  # a function's name is no scope
        ("custom", None),
        ("nowhere", None),
    ],
)
def test_instruction_belongs_to_the_part_that_it_comes_from(instruction, group):
    assert OpGroups(TEXT).group(instruction) == group


def test_branches_and_loops_alone_are_containers():
    groups = OpGroups(TEXT)
    assert [name for name in ("dot.3", "ynn_fusion.2", "cond.4", "custom") if groups.is_container(name)] == ["cond.4"]


def test_scopes_under_transformations_of_jax_are_found():
    assert scope_of("jit(step)/while/body/cond/branch_3_fun/jit(_half_layer)/norm/mul") == "norm"
    assert scope_of("jit(step)/while/body/add") is None


def test_compiled_step_has_every_group_and_little_without(tmp_path, programs_dir):
    engine = make_engine(str(make_tiny_model(tmp_path)), programs_dir)
    text = engine.runner.programs[(8, 8)].as_text()
    groups = OpGroups(text)
    names = [line.split(" = ")[0].split("%")[-1] for line in text.splitlines() if " fusion(" in line]
    found = [groups.group(name) for name in names]
    assert set(GROUPS) - set(found) <= {"embed", "head"}  # on CPU these are one instruction each, and no fusion
    assert set(GROUPS) <= {scope_of(part.split('"')[0]) for part in text.split('op_name="')[1:]}
    assert found.count(None) < 0.2 * len(found)
    engine.close()
