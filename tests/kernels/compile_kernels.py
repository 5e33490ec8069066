"""Compiles every kernel configuration for the architectures of its arguments (80 89 90) without a GPU; prints a JSON
list of what came out.

A program of its own, because triton decides when it is imported whether kernels are compiled or interpreted.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastgrpo_kernels import POLICY_LOSSES, _exact_rows, _exp_gemm, _exp_rows, _grpo_rows, _scale

POINTERS = {"target_ptr": "*i64", "flags_ptr": "*u8", "column_ptr": "*i32", "tile_column_ptr": "*i32"}
LOSS_NUMBERS = {"clip_low", "clip_high", "clip_c", "importance_max", "kl_coef", "entropy_coef", "tau_pos", "tau_neg"}
NUMBERS = LOSS_NUMBERS | {"softcap_inverse"}
WIDE = {"logits_stride", "exp_stride", "gradient_stride", "hidden_stride", "weight_stride"}
OPERANDS = {"exp_ptr", "gradient_ptr", "hidden_ptr", "bias_ptr"}


def argument(name: str, operand: str) -> str:
    if name.endswith("_ptr"):
        return POINTERS.get(name, f"*{operand}" if name in OPERANDS else "*fp32")
    return "fp32" if name in NUMBERS else "i64" if name in WIDE else "i32"


def compile_one(
    kernel, constants: dict, arch: int, operand="bf16", descriptors=None, num_warps=4, num_stages=3
) -> dict:
    signature = {name: argument(name, operand) for name in kernel.arg_names} | (descriptors or {})
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {"kernel": kernel.__name__, "arch": arch, "shared": compiled.metadata.shared, "constants": str(constants)}


def rows_form(arch: int):
    sweep = {"BLOCK": _exp_rows.SWEEP.block}
    for operand, bias, softcap in (("bf16", False, False), ("fp32", True, True)):
        flags = {"HAS_BIAS": bias, "HAS_SOFTCAP": softcap}
        for kernel, more in (
            (_exp_rows.exp_rows_kernel, {"TOP": False}),
            (_exp_rows.exp_rows_kernel, {"TOP": True}),
            (_exp_rows.entropy_gradients_kernel, {}),
        ):
            constants = {**flags, **more, **sweep}
            yield compile_one(kernel, constants, arch, operand, num_warps=_exp_rows.SWEEP.num_warps)
        one_row = {**flags, "BLOCK": _exact_rows._BLOCK}
        yield compile_one(_exact_rows.refine_kernel, {**one_row, "TARGET": True}, arch, operand)
    yield compile_one(_scale.scale_kernel, {"PER_ROW": True, "BLOCK": _scale._BLOCK}, arch, num_warps=8)
    for policy in range(len(POLICY_LOSSES)):
        flags = dict.fromkeys(("HAS_OLD", "HAS_REF", "HAS_SAMPLER", "HAS_ENTROPY", "STRAIGHT"), policy != 1)
        flags |= {"HAS_IMPORTANCE": policy == 1, "POLICY": policy, "KL_FORM": policy, "BLOCK": _grpo_rows._BLOCK}
        yield compile_one(_grpo_rows.grpo_rows_kernel, flags, arch)


def epilogue_form(arch: int):
    gemm, merge = _exp_gemm.GEMM, {"ROWS": _exp_gemm._MERGE_ROWS, "TILES": _exp_gemm._MERGE_TILES}
    tile = {"ROWS": gemm.rows, "COLUMNS": gemm.columns, "DEPTH": gemm.depth, "GROUP": gemm.group, "PROGRAMS": 132}
    for top in (False, True):
        yield compile_one(_exp_gemm.merge_kernel, {**merge, "TOP": top}, arch)
    for bias, softcap, store, top in (
        (False, False, True, False),
        (False, False, False, True),
        (False, False, True, True),
        (True, True, True, True),
    ):
        flags = {"HAS_BIAS": bias, "HAS_SOFTCAP": softcap}
        stored = f"tensordesc<bf16[{gemm.rows},{gemm.columns // 2 if store else gemm.depth}]>"
        descriptors = {
            "hidden_desc": f"tensordesc<bf16[{gemm.rows},{gemm.depth}]>",
            "weight_desc": f"tensordesc<bf16[{gemm.columns},{gemm.depth}]>",
            "exp_desc": stored,
        }
        constants = {**flags, "STORE": store, "TOP": top, **tile, "FLATTEN": gemm.flatten}
        yield compile_one(
            _exp_gemm.exp_gemm_kernel, constants, arch, "bf16", descriptors, gemm.num_warps, gemm.num_stages
        )
        if store:
            one_row = {**flags, "BLOCK": _exact_rows._BLOCK}
            yield compile_one(_exact_rows.target_logits_kernel, one_row, arch)
            yield compile_one(_exact_rows.refine_kernel, {**one_row, "TARGET": False}, arch)
            yield compile_one(
                _exp_gemm.settle_kernel, {"HAS_SOFTCAP": softcap, "COLUMNS": gemm.columns // 2, "BLOCK": 4096}, arch
            )


if __name__ == "__main__":
    archs = [int(arch) for arch in sys.argv[1:]]
    results = [result for arch in archs for result in rows_form(arch)]
    results += epilogue_form(90) if 90 in archs else []
    json.dump(results, sys.stdout)
