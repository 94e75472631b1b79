#include "comm/mpi_types.hpp"

#include "comm/mpi_backend.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <atomic>

namespace accelerate::comm {
namespace {

template <class T, class Combine>
void reduce_in_float(void* in, void* inout, int* length, MPI_Datatype*) {
  const T* a = static_cast<const T*>(in);
  T* b = static_cast<T*>(inout);
  for (int i = 0; i < *length; ++i)
    b[i] = static_cast<T>(Combine()(static_cast<float>(a[i]), static_cast<float>(b[i])));
}

struct Sum {
  float operator()(float a, float b) const { return a + b; }
};
struct Product {
  float operator()(float a, float b) const { return a * b; }
};
// NaN wins, as in torch.
struct Minimum {
  float operator()(float a, float b) const { return a != a || a < b ? a : b; }
};
struct Maximum {
  float operator()(float a, float b) const { return a != a || a > b ? a : b; }
};

/// The type and the operations of one 16-bit dtype; made once, and gone with MPI itself.
template <class T>
struct Small {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op sum = MPI_OP_NULL, product = MPI_OP_NULL, minimum = MPI_OP_NULL, maximum = MPI_OP_NULL;

  Small() {
    check_mpi(MPI_Type_contiguous(sizeof(T), MPI_BYTE, &type), "MPI_Type_contiguous");
    check_mpi(MPI_Type_commit(&type), "MPI_Type_commit");
    check_mpi(MPI_Op_create(&reduce_in_float<T, Sum>, 1, &sum), "MPI_Op_create");
    check_mpi(MPI_Op_create(&reduce_in_float<T, Product>, 1, &product), "MPI_Op_create");
    check_mpi(MPI_Op_create(&reduce_in_float<T, Minimum>, 1, &minimum), "MPI_Op_create");
    check_mpi(MPI_Op_create(&reduce_in_float<T, Maximum>, 1, &maximum), "MPI_Op_create");
  }

  MPI_Op op(c10d::ReduceOp::RedOpType op) const {
    switch (op) {
      case c10d::ReduceOp::SUM:
        return sum;
      case c10d::ReduceOp::PRODUCT:
        return product;
      case c10d::ReduceOp::MIN:
        return minimum;
      case c10d::ReduceOp::MAX:
        return maximum;
      default:
        return MPI_OP_NULL;
    }
  }
};

const Small<c10::Half>& half() {
  static const Small<c10::Half> instance;
  return instance;
}
const Small<c10::BFloat16>& bfloat16() {
  static const Small<c10::BFloat16> instance;
  return instance;
}

}  // namespace

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> buffer{};
  int length = 0;
  MPI_Error_string(code, buffer.data(), &length);
  throw std::runtime_error(
      text::concat(call, ": ", std::string(buffer.data(), static_cast<std::size_t>(length))));
}

MPI_Datatype mpi_type(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return MPI_FLOAT;
    case c10::ScalarType::Double:
      return MPI_DOUBLE;
    case c10::ScalarType::Half:
      return half().type;
    case c10::ScalarType::BFloat16:
      return bfloat16().type;
    case c10::ScalarType::Byte:
      return MPI_UINT8_T;
    case c10::ScalarType::Char:
      return MPI_INT8_T;
    case c10::ScalarType::Short:
      return MPI_INT16_T;
    case c10::ScalarType::Int:
      return MPI_INT32_T;
    case c10::ScalarType::Long:
      return MPI_INT64_T;
    default:
      break;
  }
  throw UnsupportedError(
      text::concat("Tensors of ", c10::toString(dtype),
                   " cannot be reduced over MPI. Convert them to a wider dtype first."));
}

MPI_Op mpi_op(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op) {
  MPI_Op found = MPI_OP_NULL;
  if (dtype == c10::ScalarType::Half) {
    found = half().op(op);
  } else if (dtype == c10::ScalarType::BFloat16) {
    found = bfloat16().op(op);
  } else {
    const bool bits = c10::isIntegralType(dtype, /*includeBool=*/false);
    switch (op) {
      case c10d::ReduceOp::SUM:
        found = MPI_SUM;
        break;
      case c10d::ReduceOp::PRODUCT:
        found = MPI_PROD;
        break;
      case c10d::ReduceOp::MIN:
        found = MPI_MIN;
        break;
      case c10d::ReduceOp::MAX:
        found = MPI_MAX;
        break;
      case c10d::ReduceOp::BAND:
        found = bits ? MPI_BAND : MPI_OP_NULL;
        break;
      case c10d::ReduceOp::BOR:
        found = bits ? MPI_BOR : MPI_OP_NULL;
        break;
      case c10d::ReduceOp::BXOR:
        found = bits ? MPI_BXOR : MPI_OP_NULL;
        break;
      default:
        break;
    }
  }
  if (found == MPI_OP_NULL) {
    throw UnsupportedError(text::concat("MPI has no reduction of this kind (c10d's number ",
                                        static_cast<int>(op), ") for ", c10::toString(dtype), "."));
  }
  return found;
}

MpiUnits mpi_units(std::int64_t bytes) {
  if (bytes % 16 == 0) return {MPI_C_DOUBLE_COMPLEX, bytes / 16, 16};
  if (bytes % 8 == 0) return {MPI_UINT64_T, bytes / 8, 8};
  if (bytes % 4 == 0) return {MPI_UINT32_T, bytes / 4, 4};
  if (bytes % 2 == 0) return {MPI_UINT16_T, bytes / 2, 2};
  return {MPI_BYTE, bytes, 1};
}

namespace {
std::atomic<std::int64_t> piece{std::int64_t{1} << 30};
}
std::int64_t mpi_piece() { return piece; }
void set_mpi_piece(std::int64_t units) { piece = units; }

}  // namespace accelerate::comm
