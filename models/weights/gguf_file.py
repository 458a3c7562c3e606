"""GgufFile: a GGUF container, memory-mapped and checked against its own length. It knows nothing of models."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from models.weights.stand_ins import refuse_stand_in

DEQUANTIZE_ROWS = 256  # a few MB of temporaries: fits the caches and still amortises numpy's per-call cost


class _BoundedReader(gguf.GGUFReader):
    """gguf's reader, made strict and fast where it is lax and slow.

    It slices past the end of a cut file without a word, so reads are bounded here. And it makes three numpy arrays for
    each element of an array: 2.3 s for a vocabulary of 49152 tokens, against 0.1 s for what is below.
    """

    def __init__(self, path: Path):
        self._bytes = None
        super().__init__(path, "r")

    def _get(self, offset, dtype, count=1, override_order=None):
        if self._bytes is None:
            self._bytes = memoryview(self.data)
        itemsize = np.dtype(dtype).itemsize
        self._require(offset, itemsize * int(count))
        array = np.frombuffer(self._bytes, dtype, int(count), offset)
        return array.view(array.dtype.newbyteorder(self.byte_order if override_order is None else override_order))

    def _require(self, offset: int, num_bytes: int) -> None:
        if offset + num_bytes > len(self._bytes):
            raise ValueError(f"cut short: {num_bytes} bytes wanted at {offset}, the file has {len(self._bytes)}")

    def _get_field_parts(self, orig_offs, raw_type):
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        length = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        types = [gguf.GGUFValueType.ARRAY, item_type]
        if item_type == gguf.GGUFValueType.STRING:
            parts, end = self._get_strings(start, length)
            return end - orig_offs, parts, list(range(length)), types
        if item_type not in self.gguf_scalar_to_np:
            raise ValueError(f"arrays of {item_type.name} are not supported")
        values = self._get(start, self.gguf_scalar_to_np[item_type], length)
        return 12 + values.nbytes, [values], [0], types

    def _get_strings(self, offset: int, count: int) -> tuple[list[memoryview], int]:
        length_of = struct.Struct("<Q" if self.endianess == gguf.GGUFEndian.LITTLE else ">Q").unpack_from
        view, parts = self._bytes, []
        for _ in range(count):
            self._require(offset, 8)
            (length,) = length_of(view, offset)
            offset += 8
            self._require(offset, length)
            parts.append(view[offset : offset + length])
            offset += length
        return parts, offset


class GgufFile:
    """Metadata and tensors of one GGUF file. Nothing is copied out of the map until it is asked for.

    Raises ValueError, one line that names the file, when it is not a GGUF file, is cut short, or contradicts itself.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        refuse_stand_in(self.path)
        with self.path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ValueError(f"{self.path}: not a GGUF file: it begins with {magic!r}, not b'GGUF'")
        try:
            with np.errstate(over="raise"):  # an offset that wraps around
                reader = _BoundedReader(self.path)
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        except (ValueError, KeyError, ArithmeticError, MemoryError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{self.path}: not a readable GGUF file: {reason}") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, outermost dimension first (a matrix is [out, in])."""
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32. ValueError where it is absent or its quantisation is unknown."""
        if name not in self._tensors:
            raise ValueError(f"{self.path}: tensor {name} is missing")
        tensor = self._tensors[name]
        kind, data = tensor.tensor_type, np.asarray(tensor.data)
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F64):
            return data.astype(np.float32)
        quant = getattr(gguf.quants, kind.name, None)
        if quant is None:
            raise ValueError(f"{self.path}: tensor {name} is quantised as {kind.name}, which gguf cannot dequantise")
        quant.init_grid()
        shape = tuple(int(n) for n in reversed(tensor.shape))
        rows = data.reshape(-1, data.shape[-1])
        out = np.empty((len(rows), shape[-1]), np.float32)
        for start in range(0, len(rows), DEQUANTIZE_ROWS):
            out[start : start + DEQUANTIZE_ROWS] = quant.dequantize_rows(rows[start : start + DEQUANTIZE_ROWS])
        return out.reshape(shape)
