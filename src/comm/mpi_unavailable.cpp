// Built in place of the mpi_*.cpp files where no MPI was found.
#include "comm/mpi_backend.hpp"

#include <accelerate/base/error.hpp>

namespace accelerate::comm {
namespace {

[[noreturn]] void refuse() {
  throw UnsupportedError(
      "MPI is needed, for the mpi backend was asked for or mpirun started this program, and this "
      "build of accelerate-cpp has "
      "none. Install libopenmpi-dev and build with -DACCELERATE_WITH_MPI=ON; or use the gloo "
      "backend, and under mpirun set "
      "MASTER_ADDR and MASTER_PORT.");
}

}  // namespace

bool have_mpi() { return false; }
MpiPlace mpi_place() { refuse(); }
std::string mpi_broadcast(const std::string&) { refuse(); }
c10::intrusive_ptr<c10d::Backend> make_mpi_backend(const c10::intrusive_ptr<c10d::Store>&,
                                                   const std::vector<int>&, int,
                                                   std::chrono::milliseconds) {
  refuse();
}
void give_mpi_up() noexcept {}
void finish_mpi(bool) noexcept {}
void set_mpi_piece(std::int64_t) { refuse(); }

}  // namespace accelerate::comm
