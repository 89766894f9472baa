"""What accelerators can do: a catalogue of data sheets, for figures of merit and for planning.

Peak rates are those of the dense matrix units without sparsity, in FLOP/s; memory in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_T = 1e12
_GB = 1e9


@dataclass(frozen=True)
class Accelerator:
    """One kind of device.

    Attributes:
        flops: peak FLOP/s by precision (`fp32` where TF32 is off).
        memory_bytes: of one device.
        memory_bandwidth: bytes/s.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float


def _accelerator(name: str, half: float, single: float, memory_gb: float, bandwidth_gb: float) -> Accelerator:
    flops = {"bf16": half * _T, "fp16": half * _T, "fp32": single * _T}
    return Accelerator(name, flops, memory_gb * _GB, bandwidth_gb * _GB)


CATALOGUE = {
    # NVIDIA's data sheets. The names are parts of what torch.cuda.get_device_name says; the first that is
    # found counts, so that longer names come before shorter ones.
    "H200": _accelerator("H200-SXM", 989.0, 67.0, 141, 4800),
    "H100 PCIe": _accelerator("H100-PCIe", 756.0, 51.0, 80, 2000),
    "H100": _accelerator("H100-SXM", 989.0, 67.0, 80, 3350),
    "B200": _accelerator("B200", 2250.0, 75.0, 180, 8000),
    "A100-SXM4-80GB": _accelerator("A100-SXM-80GB", 312.0, 19.5, 80, 2039),
    "A100 80GB": _accelerator("A100-PCIe-80GB", 312.0, 19.5, 80, 1935),
    "A100": _accelerator("A100-40GB", 312.0, 19.5, 40, 1555),
    "A10G": _accelerator("A10G", 70.0, 31.5, 24, 600),
    "A10": _accelerator("A10", 125.0, 31.2, 24, 600),
    "A40": _accelerator("A40", 149.7, 37.4, 48, 696),
    "L40S": _accelerator("L40S", 362.0, 91.6, 48, 864),
    "L40": _accelerator("L40", 181.0, 90.5, 48, 864),
    "L4": _accelerator("L4", 121.0, 30.3, 24, 300),
    "V100": _accelerator("V100", 125.0, 15.7, 32, 900),
    "T4": _accelerator("T4", 65.0, 8.1, 16, 320),
    "RTX 4090": _accelerator("RTX-4090", 165.2, 82.6, 24, 1008),
    "RTX 3090": _accelerator("RTX-3090", 71.0, 35.6, 24, 936),
}


def find_accelerator(device_name: str) -> Accelerator | None:
    """The catalogue's entry for a device, by the name that its driver gives; None where it is not known."""
    return next((entry for part, entry in CATALOGUE.items() if part in device_name), None)
