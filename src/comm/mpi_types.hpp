#pragma once

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>

namespace accelerate::comm {

/// Throws std::runtime_error with MPI's own text unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* call);

/// MPI's type for a dtype that can be reduced. fp16 and bf16 are types of our own.
MPI_Datatype mpi_type(c10::ScalarType dtype);
/// MPI's operation; for fp16 and bf16 one of our own, which computes in float.
MPI_Op mpi_op(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op);

/// Memory of `bytes` bytes as a count of the largest plain unit that divides it.
struct MpiUnits {
  MPI_Datatype type;
  std::int64_t count;
  std::int64_t unit_bytes;
};
MpiUnits mpi_units(std::int64_t bytes);

/// The most units that one call is given where a message can be cut into pieces: 2^30, or what
/// set_mpi_piece said. Equal on all ranks.
std::int64_t mpi_piece();

}  // namespace accelerate::comm
