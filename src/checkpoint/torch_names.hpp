#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <string_view>

namespace accelerate::checkpoints {

/// What Python calls a dtype, and the class of storages that a file names for it. The newer dtypes
/// have none: their storage is "UntypedStorage" and the dtype stands beside it.
struct TorchName {
  c10::ScalarType dtype;
  std::string_view name;
  std::string_view storage;
};

inline constexpr std::array<TorchName, 22> kTorchNames{{
    {c10::kDouble, "float64", "DoubleStorage"},
    {c10::kFloat, "float32", "FloatStorage"},
    {c10::kHalf, "float16", "HalfStorage"},
    {c10::kBFloat16, "bfloat16", "BFloat16Storage"},
    {c10::kLong, "int64", "LongStorage"},
    {c10::kInt, "int32", "IntStorage"},
    {c10::kShort, "int16", "ShortStorage"},
    {c10::kChar, "int8", "CharStorage"},
    {c10::kByte, "uint8", "ByteStorage"},
    {c10::kBool, "bool", "BoolStorage"},
    {c10::kComplexDouble, "complex128", "ComplexDoubleStorage"},
    {c10::kComplexFloat, "complex64", "ComplexFloatStorage"},
    {c10::kComplexHalf, "complex32", ""},
    {c10::kFloat8_e5m2, "float8_e5m2", ""},
    {c10::kFloat8_e4m3fn, "float8_e4m3fn", ""},
    {c10::kFloat8_e5m2fnuz, "float8_e5m2fnuz", ""},
    {c10::kFloat8_e4m3fnuz, "float8_e4m3fnuz", ""},
    {c10::kFloat8_e8m0fnu, "float8_e8m0fnu", ""},
    {c10::kFloat4_e2m1fn_x2, "float4_e2m1fn_x2", ""},
    {c10::kUInt16, "uint16", ""},
    {c10::kUInt32, "uint32", ""},
    {c10::kUInt64, "uint64", ""},
}};

/// Values within values, as deep as this: Python's own state dicts have five levels.
inline constexpr int kMostDepth = 200;

}  // namespace accelerate::checkpoints
