#include "box.cuh"
#include "tensor_map.cuh"

namespace nanovllm::packed {
namespace {

bool make_maps(Maps& maps, const Product& p) {
  const cuuint64_t rows = p.rows, groups = p.steps;
  const cuuint64_t sizes[3] = {128, rows, groups / 2}, strides[2] = {p.weight_stride, 128};
  const cuuint32_t box[3] = {128, 8, BOX_WARPS};
  const cuuint64_t scale_sizes[2] = {groups, rows}, scale_strides[1] = {cuuint64_t(p.scale_stride) * 2};
  const cuuint32_t scale_box[2] = {BOX_WARPS * BOX_GROUPS, 8};
  return encode(maps.weight, CU_TENSOR_MAP_DATA_TYPE_UINT8, p.weight, 3, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B) &&
         encode(maps.scale, CU_TENSOR_MAP_DATA_TYPE_UINT16, p.scale, 2, scale_sizes, scale_strides, scale_box,
                CU_TENSOR_MAP_SWIZZLE_NONE);
}

template <typename SCALE>
cudaError_t box_launch(const Product& p, const Launch& how, cudaStream_t stream) {
  Maps maps;
  if (p.tokens != 1 || how.warps != BOX_WARPS) return cudaErrorInvalidValue;
  if (encoder() == nullptr) return cudaErrorNotSupported;
  if (!make_maps(maps, p)) return cudaErrorInvalidValue;
  const auto kernel = box_kernel<SCALE>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(p.row_warps);
  config.blockDim = dim3(BOX_THREADS);
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p, maps);
}

}  // namespace

cudaError_t box_int4_product(const Product& p, const Launch& how, Real scale, cudaStream_t stream) {
  return scale == Real::float16 ? box_launch<__half>(p, how, stream) : box_launch<__nv_bfloat16>(p, how, stream);
}

}  // namespace nanovllm::packed
