#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace accelerate::comm {

/// False when the library was built without MPI.
bool have_mpi();

/// Rank and size of this process in MPI's world; starts MPI if nobody has. Throws UnsupportedError
/// without MPI, ConfigError when MPI cannot be used from several threads.
struct MpiPlace {
  int rank;
  int size;
};
MpiPlace mpi_place();

/// The bytes of rank 0 of MPI's world, on all its ranks. Blocking, collective over MPI's world.
std::string mpi_broadcast(const std::string& bytes);

/// A backend over MPI for a group of these ranks of MPI's world. Collective over them; they meet at
/// the store first, so that a rank which does not come is a timeout and not a hang.
c10::intrusive_ptr<c10d::Backend> make_mpi_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                   const std::vector<int>& global_ranks, int rank,
                                                   std::chrono::milliseconds timeout);

/// This process fails, or lost another: MPI is not finalized at its end, which would wait for ranks
/// that do not come.
void give_mpi_up() noexcept;
/// Ends what MPI still does for this process and finalizes MPI, if it was started here and nobody
/// failed. For the end of the process.
void finish_mpi(bool failed) noexcept;

/// The most units one MPI call is given where a message can be cut into pieces; equal on all ranks.
/// 2^30 unless tests, which have no memory for that many, say otherwise.
void set_mpi_piece(std::int64_t units);

}  // namespace accelerate::comm
