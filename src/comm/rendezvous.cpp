#include "comm/rendezvous.hpp"

#include "comm/mpi_backend.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>

#include <torch/csrc/distributed/c10d/exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <future>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>

namespace accelerate::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using text::concat;

constexpr const char* kOperation = "rendezvous";
/// How often those who wait for others say so.
constexpr std::chrono::seconds kNoticeInterval{15};
/// How long a store may take to answer once it is connected to.
constexpr std::chrono::seconds kGreeting{2};

milliseconds left_until(Clock::time_point deadline) {
  return std::max(milliseconds(0),
                  std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

std::string where(const std::string& host, int port) { return concat(host, ":", port); }

/// A client of the store greets it and waits for the answer without a limit. So it does that on a
/// thread of its own, which is left behind when something else holds the port and never answers.
c10::intrusive_ptr<c10d::Store> connect_within(const std::string& host,
                                               const c10d::TCPStoreOptions& options) {
  std::promise<c10::intrusive_ptr<c10d::Store>> opened;
  auto store = opened.get_future();
  std::thread([host, options, opened = std::move(opened)]() mutable {
    try {
      opened.set_value(c10::make_intrusive<c10d::TCPStore>(host, options));
    } catch (...) {
      opened.set_exception(std::current_exception());
    }
  }).detach();
  // The attempts to connect may need the whole time; what failed then says why.
  if (store.wait_for(options.timeout + kGreeting) != std::future_status::ready) {
    throw std::runtime_error(
        "the port is open, and whoever holds it does not answer as a store does");
  }
  return store.get();
}

c10::intrusive_ptr<c10d::Store> open_store(const std::string& host, int port,
                                           const Topology& topology, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.isServer = topology.rank == 0 && !topology.launcher_has_store;
  options.waitWorkers = false;
  // Whole seconds are what its connection attempts count in.
  options.timeout = std::max(timeout, milliseconds(1000));
  try {
    if (!options.isServer) return connect_within(host, options);
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  } catch (const std::exception& error) {
    const std::string what = error.what();
    if (topology.rank == 0) {
      if (what.find("EADDRINUSE") != std::string::npos ||
          what.find("address already in use") != std::string::npos) {
        std::throw_with_nested(ConfigError(
            concat("Port ", port,
                   " on this machine, where the processes were to meet, is taken by another "
                   "program. Choose "
                   "another one (MASTER_PORT, or --main_process_port of accelerate-cpp launch; 0 "
                   "there means any free one), or "
                   "end the program that holds it: an earlier run may still be going.")));
      }
      std::throw_with_nested(
          DistributedError(concat("Rank 0 could not open the store at ", where(host, port),
                                  ", where the processes were to meet. Is MASTER_ADDR "
                                  "a name of this machine?"),
                           kOperation, topology.rank));
    }
    std::throw_with_nested(
        TimeoutError(concat("Rank ", topology.rank, " found no rank 0 at ", where(host, port),
                            " within ", text::format_seconds(timeout.count() / 1e3),
                            ". Either rank 0 was not started or died, or MASTER_ADDR or "
                            "MASTER_PORT is not the same for all ranks, or another program holds "
                            "the port, or a firewall is between them."),
                     kOperation, topology.rank));
  }
}

std::vector<int> missing_ranks(c10d::Store& store, int world_size) {
  std::vector<int> missing;
  for (int rank = 0; rank < world_size; ++rank) {
    if (!store.check({concat("arrived/", rank)})) missing.push_back(rank);
  }
  return missing;
}

/// Every rank says that it is here; rank 0 tells all whether everyone is, or who is missing.
void wait_for_everyone(c10d::Store& store, const Topology& topology, const std::string& place,
                       milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const auto fail = [&](const std::string& missing) {
    throw TimeoutError(
        concat("Of ", topology.world_size, " processes that were to meet at ", place, ", rank ",
               missing, " did not come within ", text::format_seconds(timeout.count() / 1e3),
               ". Look whether it was started and what it said last; raise the timeout "
               "(ACCELERATE_TIMEOUT, in seconds) if it "
               "is only slow."),
        kOperation, topology.rank);
  };
  if (store.add(concat("arrived/", topology.rank), 1) > 1) {
    throw ConfigError(concat(
        "Another process came to ", place, " as rank ", topology.rank,
        " before this one. Two runs share the address, or two processes were given one RANK."));
  }
  if (topology.rank == 0) {
    auto notice = Clock::now() + kNoticeInterval;
    auto pause = milliseconds(1);
    while (true) {
      const auto missing = missing_ranks(store, topology.world_size);
      if (missing.empty()) break;
      if (Clock::now() > deadline) {
        store.set("verdict", text::join(missing));
        // The store goes with this process; those who wait have to read it first.
        const auto readers = topology.world_size - 1 - static_cast<std::int64_t>(missing.size());
        const auto patience = Clock::now() + milliseconds(3000);
        while (store.add("verdict/read", 0) < readers && Clock::now() < patience) {
          std::this_thread::sleep_for(milliseconds(10));
        }
        fail(text::join(missing));
      }
      if (Clock::now() > notice) {
        log::warning(concat("Still waiting at ", place, " for rank ", text::join(missing), " of ",
                            topology.world_size, "."));
        notice = Clock::now() + kNoticeInterval;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, milliseconds(100));
    }
    store.set("verdict", "complete");
    return;
  }
  std::string verdict;
  try {
    // Rank 0 may have started its clock later than this rank did.
    store.wait({"verdict"}, left_until(deadline) + timeout / 10 + milliseconds(2000));
    verdict = store.get_to_str("verdict");
  } catch (const std::exception&) {
    std::throw_with_nested(TimeoutError(
        concat("Rank ", topology.rank, " came to ", place, " and rank 0 did not say within ",
               text::format_seconds(timeout.count() / 1e3),
               " that all are here: it ended, or it hangs."),
        kOperation, topology.rank));
  }
  if (verdict != "complete") {
    store.add("verdict/read", 1);
    fail(verdict);
  }
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "localhost";
  return name.data();
}

/// Rank 0 opens the store at a free port and leaves its address in the file; the others read it.
Rendezvous meet_by_file(const Topology& topology, milliseconds timeout) {
  namespace fs = std::filesystem;
  const fs::path file = topology.rendezvous_file;
  Rendezvous met;
  if (topology.rank == 0) {
    met.host = "127.0.0.1";
    met.store = open_store(met.host, 0, topology, timeout);
    const int port = c10::static_intrusive_pointer_cast<c10d::TCPStore>(met.store)->getPort();
    // Written aside and renamed, so that nobody reads half of it.
    const fs::path aside = file.string() + concat(".", ::getpid());
    std::ofstream out(aside);
    out << host_name() << ' ' << port << '\n';
    out.close();
    std::error_code error;
    if (out) fs::rename(aside, file, error);
    if (!out || error) {
      throw ConfigError(concat("The rendezvous file ", file.string(), " cannot be written (",
                               error.message(),
                               "). ACCELERATE_RENDEZVOUS_FILE has to name a file in a folder that "
                               "every process sees and rank "
                               "0 may write to."));
    }
    return met;
  }
  const auto deadline = Clock::now() + timeout;
  while (true) {
    std::string host;
    int port = 0;
    if (std::ifstream in(file); in >> host >> port) {
      if (host == host_name()) host = "127.0.0.1";
      try {
        // The file may be left over from an earlier run; so try for a short time, then read again.
        met.store =
            open_store(host, port, topology, std::min(left_until(deadline), milliseconds(2000)));
        met.host = host;
        return met;
      } catch (const TimeoutError&) {
        if (Clock::now() > deadline) throw;
      }
    }
    if (Clock::now() > deadline) {
      throw TimeoutError(
          concat("Rank ", topology.rank, " waited ", text::format_seconds(timeout.count() / 1e3),
                 " for rank 0 to write its address into ", file.string(),
                 ". Was rank 0 started, and does it see the same file?"),
          kOperation, topology.rank);
    }
    std::this_thread::sleep_for(milliseconds(20));
  }
}

/// Rank 0 opens the store at a free port and tells the others over MPI.
Rendezvous meet_by_mpi(const Topology& topology, milliseconds timeout) {
  const auto place = mpi_place();
  if (place.rank != topology.rank || place.size != topology.world_size) {
    throw ConfigError(
        concat("To MPI this process is rank ", place.rank, " of ", place.size,
               ", and OpenMPI's variables say rank ", topology.rank, " of ", topology.world_size,
               ". Start the program directly with mpirun, or set MASTER_ADDR and MASTER_PORT."));
  }
  Rendezvous met;
  if (topology.rank == 0) {
    met.host = topology.local_world_size == topology.world_size ? "127.0.0.1" : host_name();
    try {
      met.store = open_store(met.host, 0, topology, timeout);
    } catch (...) {
      mpi_broadcast("");  // the others wait for it
      throw;
    }
    mpi_broadcast(concat(met.host, " ",
                         c10::static_intrusive_pointer_cast<c10d::TCPStore>(met.store)->getPort()));
    return met;
  }
  std::istringstream address(mpi_broadcast(""));
  int port = 0;
  if (!(address >> met.host >> port)) {
    throw DistributedError(
        "Rank 0 could not open the store where the processes were to meet; see its output.",
        kOperation, topology.rank);
  }
  met.store = open_store(met.host, port, topology, timeout);
  return met;
}

}  // namespace

Rendezvous meet(const Topology& topology, milliseconds timeout) {
  const auto start = Clock::now();
  Rendezvous met;
  std::string place;
  if (topology.kind == LaunchKind::file) {
    met = meet_by_file(topology, timeout);
    place = topology.rendezvous_file;
  } else if (topology.kind == LaunchKind::openmpi && topology.master_addr.empty()) {
    met = meet_by_mpi(topology, timeout);
    place = "an address agreed over MPI";
  } else {
    met.host = topology.master_addr;
    met.store = open_store(met.host, topology.master_port, topology, timeout);
    place = where(topology.master_addr, topology.master_port);
  }
  // torchrun keeps one store for all attempts of a run; the prefix is this library's part of it.
  met.store =
      c10::make_intrusive<c10d::PrefixStore>(concat("accelerate/", topology.run_id), met.store);
  const auto spent = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
  try {
    wait_for_everyone(*met.store, topology, place, std::max(timeout - spent, milliseconds(1)));
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    std::throw_with_nested(
        DistributedError(concat("Rank ", topology.rank, " lost the store at ", place,
                                " while it waited for the others. Rank 0, which keeps it, "
                                "ended; look for the first error in its output."),
                         kOperation, topology.rank));
  }
  met.store->setTimeout(timeout);
  // Nobody needs the file any more, and the next run must not find it.
  if (topology.kind == LaunchKind::file && topology.rank == 0) {
    std::error_code ignored;  // a file that stays is overwritten by the next run
    std::filesystem::remove(topology.rendezvous_file, ignored);
  }
  return met;
}

}  // namespace accelerate::comm
