"""A GPU as XLA wants it described, to compile for it where there is none."""

from __future__ import annotations

import dataclasses

from pallas_kernels.gpu.chips import Gpu


@dataclasses.dataclass(frozen=True)
class Extra:
    """What XLA asks for and kernels do not: published numbers."""

    fpus: int  # of a core, for float32
    cache: int  # bytes of the second level
    memory: int  # bytes
    gigahertz: float
    accelerated: bool  # whether code is for this generation only: sm_90a


EXTRA = {
    "A100": Extra(64, 40 << 20, 80 << 30, 1.41, False),
    "L40S": Extra(128, 96 << 20, 48 << 30, 2.52, False),
    "H100": Extra(128, 50 << 20, 80 << 30, 1.98, True),
    "H200": Extra(128, 50 << 20, 141 << 30, 1.98, True),
    "B200": Extra(128, 126 << 20, 180 << 30, 1.965, True),
}


def described(gpu: Gpu) -> str:
    """The text form of XLA's `GpuTargetConfigProto`."""
    extra, (major, minor) = EXTRA[gpu.name], gpu.capability
    features = "ACCELERATED_FEATURES" if extra.accelerated else "NONE"
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": gpu.smem,
        "shared_memory_per_block_optin": gpu.smem_of_block,
        "threads_per_core_limit": gpu.threads,
        "core_count": gpu.cores,
        "fpus_per_core": extra.fpus,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "memory_bandwidth": int(gpu.bytes_per_second),
        "l2_cache_size": extra.cache,
        "clock_rate_ghz": extra.gigahertz,
        "device_memory_size": extra.memory,
        "registers_per_core_limit": gpu.registers,
        "registers_per_block_limit": 65536,
        "driver_version": '"13.0.0"',
        "runtime_version": '"13.0.0"',
        "compile_time_toolkit_version": '"13.0.0"',
        "dnn_version": '"9.10.0"',
    }
    numbers = "\n".join(f"  {name}: {value}" for name, value in fields.items())
    capability = f"cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}"
    return (
        f"gpu_device_info {{\n{numbers}\n  {capability}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
        f'device_description_str: "{gpu.kind}"\n'
    )
