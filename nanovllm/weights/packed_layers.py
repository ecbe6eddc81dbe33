"""From the tensors of a quantised checkpoint to the packed weights of layers, as they arrive from the files."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

import torch
import torch.nn as nn

from nanovllm.kernels import Kernels
from nanovllm.kernels.op.selection import fastest_that_cannot_run
from nanovllm.layers.linear import ShardedParameters
from nanovllm.layers.moe import StackedMatrices
from nanovllm.layers.packed_weight import PackedWeight, bytes_and_weights
from nanovllm.layers.stored_matrices import FloatMatrix, GGUFMatrix
from nanovllm.layers.stored_matrix import StoredMatrix
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.quantization.gguf_storage import GGUFStorage
from nanovllm.weights.quantization.online import Quantiser
from nanovllm.weights.quantization.storage import PlaneError, StoredShard
from nanovllm.weights.safetensors_files import WeightError

logger = logging.getLogger(__name__)

_FUSED_PRODUCTS = {"linear_packed_silu_and_mul", "linear_packed_add_rms_norm"}
"""Ops that take packed weights of every form."""

Place = tuple[str, str, str]
"""Where a checkpoint's tensor belongs: module, parameter, shard."""


class ShardPlanes:
    """Collects the tensors of each packed shard until it is whole.

    Args:
        model: may be on the meta device.
        places: the places of the checkpoint's tensors.
        shards: the packed ones, by module and shard.
        quantiser: for layers whose weights are floats in the checkpoint; None: they stay so.

    Attributes:
        modules: the layers that get packed weights.
        names: the names of the tensors whose dimensions are not those of the weight.
        labels: how many shards are stored in each form.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        places: Mapping[str, Place],
        shards: Mapping[tuple[str, str], StoredShard],
        quantiser: Quantiser | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.labels: Counter[str] = Counter()
        self.dequantised_to_cut: list[str] = []
        self._shards, self._quantiser, self._dtype, self._device = shards, quantiser, dtype, device
        self._arrived: dict[str, dict[str, torch.Tensor]] = {}
        self._stored: dict[str, list[tuple[str, str]]] = {}
        for key, stored in shards.items():
            self._stored.setdefault(stored.name, []).append(key)
        self._wanted: dict[str, set[str]] = {name: set() for name in self._stored}
        for name in places:
            stored_name, _, plane = name.rpartition(".")
            if stored_name in self._wanted and plane in shards[self._stored[stored_name][0]].planes:
                self._wanted[stored_name].add(plane)
        self.names = {
            f"{stored.name}.{plane}"
            for stored in shards.values()
            if not isinstance(stored.storage, GGUFStorage)
            for plane in stored.planes
        }
        packed = {module for module, _ in shards}
        self._without_bias = {name for name in packed if getattr(model.get_submodule(name), "bias", None) is None}
        self._tied = model.config.tie_word_embeddings
        self._quantised: dict[str, nn.Module] = {}
        if quantiser is not None:
            self._quantised = {name: module for name, module in model.named_modules() if quantiser.takes(name, module)}
        self.modules = {module for module, _ in shards} | set(self._quantised)

    def takes(self, place: Place) -> bool:
        """Whether a tensor is a plane, or all, of a weight in a layer that gets packed weights."""
        module, parameter, shard = place
        if (module, shard) in self._shards:
            return parameter in self._shards[module, shard].planes or self._is_zero_bias(place)
        return module in self.modules and parameter == "weight"

    def _is_zero_bias(self, place: Place) -> bool:
        """Whether it is the bias of a layer that has none: some libraries write zeros there."""
        return place[1] == "bias" and place[0] in self._without_bias

    def add(self, name: str, place: Place, tensor: torch.Tensor) -> list[tuple[str, str, StoredMatrix]]:
        """Take the part of a checkpoint's tensor that is at `place`.

        Returns:
            (module, shard, matrix) of each shard that is whole now.

        Raises:
            WeightError: the tensors of a shard contradict each other.
        """
        module, parameter, shard = place
        if self._is_zero_bias(place):
            if tensor.any():
                raise WeightError(
                    f"tensor {name!r} is not zero, but config.json says that this layer has no bias", name
                )
            return []
        # Not the mapped file, of which a tensor on a CPU is a view.
        tensor = tensor.clone() if self._device.type == "cpu" else tensor.to(self._device)
        if (module, shard) not in self._shards:
            return [(module, shard, self._of_floats(module, shard, tensor))]
        stored_name = self._shards[module, shard].name
        planes = self._arrived.setdefault(stored_name, {})
        planes[parameter] = tensor
        if set(planes) < self._wanted[stored_name]:
            return []
        del self._arrived[stored_name]
        return [(*key, self._matrix(self._shards[key], planes)) for key in self._stored[stored_name]]

    def _matrix(self, stored: StoredShard, planes: Mapping[str, torch.Tensor]) -> StoredMatrix:
        try:
            matrix, dequantised = stored.matrix(planes)
        except PlaneError as e:
            name = f"{stored.name}.{e.plane}"
            raise WeightError(f"tensor {name!r} {e}", name) from e
        if dequantised:
            self.dequantised_to_cut.append(stored.name)
        self.labels["dequantised" if dequantised else stored.storage.label] += 1
        return matrix if not isinstance(matrix, FloatMatrix) else FloatMatrix(matrix.weight.to(self._dtype))

    def _of_floats(self, module: str, shard: str, tensor: torch.Tensor) -> StoredMatrix:
        weight = tensor.to(self._dtype)
        if module not in self._quantised or self._quantiser is None:
            return FloatMatrix(weight)
        matrix, label = self._quantiser.quantised(module, self._quantised[module], shard, weight)
        if label is not None:
            self.labels[label if module != "lm_head" else f"{label} (LM head)"] += 1
        return matrix

    @property
    def makes_head(self) -> bool:
        """Whether the LM head is tied to the embedding, and quantised otherwise."""
        return self._tied and "lm_head" in self._quantised

    def head_of(self, embedding: torch.Tensor) -> StoredMatrix | None:
        """A quantised LM head, from the embedding that it is tied to; None: the head is the embedding itself."""
        if not self.makes_head:
            return None
        return self._of_floats("lm_head", "", embedding)


class PackedLayers:
    """Gives layers their packed weights when all shards are there, and all other layers memory for plain ones.

    Args:
        model: its matrices are on the meta device, its other parameters on `device`.
        planes: what is packed.
        dtype: the dtype of activations.
        keep: whether weights stay packed; if not they are expanded to `dtype`.
        quantise_activations: as of `PackedWeight`.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        planes: ShardPlanes,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        keep: bool,
        quantise_activations: bool = True,
    ) -> None:
        self.device, self.names = device, planes.names
        self._model, self._planes, self._kernels, self._dtype, self._keep = model, planes, kernels, dtype, keep
        self._quantise_activations = quantise_activations
        self._matrices: dict[str, dict[str, StoredMatrix]] = {name: {} for name in planes.modules}
        self._not_finite: list[tuple[str, torch.Tensor]] = []
        for name, module in model.named_modules():
            if isinstance(module, ShardedParameters) and name not in planes.modules:
                self._give_memory(name, module)

    def _give_memory(self, name: str, module: ShardedParameters) -> None:
        weight = getattr(module, "weight", None)
        shared = name == "lm_head" and self._model.config.tie_word_embeddings
        if isinstance(weight, nn.Parameter) and weight.is_meta and not shared:
            # empty_like of a tensor on the meta device imports sympy, which takes half a second.
            memory = torch.empty(weight.shape, dtype=weight.dtype, device=self.device)
            self._set(name, nn.Parameter(memory, requires_grad=False))

    def _set(self, name: str, weight: nn.Parameter | PackedWeight) -> None:
        model = self._model
        names = [name]
        if name == "model.embed_tokens" and model.config.tie_word_embeddings and "lm_head" not in self._matrices:
            names.append("lm_head")
        for each in names:
            module = model.get_submodule(each)
            del module.weight  # a parameter's name takes no module
            module.weight = weight

    def add(self, name: str, place: Place, tensor: torch.Tensor) -> bool:
        """Whether a checkpoint's tensor belongs to a packed weight; it is taken then."""
        if place[0] == "model.embed_tokens" and self._planes.makes_head:
            head = self._planes.head_of(tensor.to(self.device))
            assert head is not None
            self._set("lm_head", self._packed([self._model.lm_head.arranged("", head)]))
        if not self._planes.takes(place):
            return False
        for module_name, shard, matrix in self._planes.add(name, place, tensor):
            self._not_finite.append((name, matrix.not_finite()))
            module = self._model.get_submodule(module_name)
            assert isinstance(module, ShardedParameters)
            if isinstance(module, StackedMatrices):
                if not (self._keep and module.load_packed(shard, matrix)):
                    self._give_memory(module_name, module)
                    module.load_shard("weight", shard, matrix.dequantised(self._dtype))
                continue
            shards = self._matrices[module_name]
            shards[shard] = module.arranged(shard, matrix)
            if len(shards) == len(module.shards):
                matrices = [shards[each] for each in module.shards]
                self._set(module_name, self._packed(matrices))
                shards.clear()
        return True

    def _packed(self, matrices: list[StoredMatrix]) -> nn.Parameter | PackedWeight:
        if not self._keep or all(isinstance(m, FloatMatrix) for m in matrices):
            whole = torch.cat([m.dequantised(self._dtype) for m in matrices])
            return nn.Parameter(whole, requires_grad=False)
        # The bytes of GGUF's blocks in the order that kernels of a GPU read.
        matrices = [m.as_planes() if isinstance(m, GGUFMatrix) else m for m in matrices]
        return PackedWeight(matrices, self._dtype, self._kernels, self._quantise_activations)

    def finish(self, checkpoint: Checkpoint) -> None:
        """After the last tensor: check that all scales are finite, and log what the model takes.

        Raises:
            WeightError: a scale or a weight is NaN or infinite.
        """
        counts = torch.stack([count for _, count in self._not_finite]).tolist() if self._not_finite else []
        for (name, _), count in zip(self._not_finite, counts):
            if count:
                raise WeightError(
                    f"tensor {name!r}, or another of the same matrix, holds NaN or infinity in {count} places; the"
                    " checkpoint is damaged: download it again",
                    name,
                )
        log_form(self._planes, "" if self._keep else ", expanded to " + str(self._dtype).removeprefix("torch."))
        if self._planes.labels and self._keep:
            nbytes, weights = bytes_and_weights(self._model)
            logger.info("weights take %.3f GB, %.2f bits each", nbytes / 1e9, 8 * nbytes / max(1, weights))
            warn_of_slower_providers(self._model, self._kernels, self.device)


def warn_of_slower_providers(model: nn.Module, kernels: Kernels, device: torch.device) -> None:
    """Warn once if products with packed weights cannot run on the fastest provider of this GPU."""
    packed = [m for m in model.modules() if isinstance(m, PackedWeight)]
    if device.type != "cuda" or not packed:
        return
    ops = {matrix.op for weight in packed for matrix in weight.matrices} | _FUSED_PRODUCTS
    for reason in fastest_that_cannot_run(kernels.providers, ops & kernels.providers.keys(), device):
        logger.warning(
            "quantised weights are slower than they could be, with equal results within rounding: %s", reason
        )


def log_form(planes: ShardPlanes, what_then: str) -> None:
    """Log how many matrices are stored in which form. what_then: what becomes of them."""
    if planes.labels:
        forms = "; ".join(f"{count} x {label}" for label, count in planes.labels.most_common())
        logger.info("quantised matrices: %s%s", forms, what_then)
    if planes.dequantised_to_cut:
        logger.warning(
            "%d matrices, the first %s, are stored in blocks that tensor_parallel_size=N would cut: their parts are"
            " dequantised; another N may keep them packed",
            len(planes.dequantised_to_cut), planes.dequantised_to_cut[0],
        )  # fmt: skip
