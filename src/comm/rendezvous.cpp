#include "comm/rendezvous.hpp"

#include "comm/mpi_backend.hpp"
#include "comm/run_store.hpp"
#include "net/gate.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>

#include <torch/csrc/distributed/c10d/exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
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

bool one_machine(const Topology& topology) {
  return topology.local_world_size == topology.world_size;
}

/// torchrun's store. A client greets it and waits for the answer without a limit. So it does that
/// on a thread of its own, which is left behind when something else holds the port and never
/// answers.
c10::intrusive_ptr<c10d::Store> join_foreign_store(const Topology& topology, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(topology.master_port);
  options.waitWorkers = false;
  // Whole seconds are what its connection attempts count in.
  options.timeout = std::max(timeout, milliseconds(1000));
  std::promise<c10::intrusive_ptr<c10d::Store>> opened;
  auto store = opened.get_future();
  std::thread([host = topology.master_addr, options, opened = std::move(opened)]() mutable {
    try {
      opened.set_value(c10::make_intrusive<c10d::TCPStore>(host, options));
    } catch (...) {
      opened.set_exception(std::current_exception());
    }
  }).detach();
  try {
    // The attempts to connect may need the whole time; what failed then says why.
    if (store.wait_for(options.timeout + kGreeting) != std::future_status::ready) {
      throw std::runtime_error(
          "the port is open, and whoever holds it does not answer as a store does");
    }
    return store.get();
  } catch (const std::exception&) {
    std::throw_with_nested(TimeoutError(
        concat("Rank ", topology.rank, " found no store of torchrun at ",
               where(topology.master_addr, topology.master_port), " within ",
               text::format_seconds(timeout.count() / 1e3),
               ". Did torchrun end, or is a firewall between this machine and that one?"),
        kOperation, topology.rank));
  }
}

/// Rank 0: keeps the store at this place, and gives its port. 0 takes a free one.
int keep_store(Rendezvous& met, int port, const Topology& topology, milliseconds timeout) {
  try {
    auto server = std::make_shared<net::StoreServer>(net::listen_at(met.place.addresses, port),
                                                     met.secret, topology.world_size);
    const int found = server->port();
    const std::string own =
        met.place.addresses.empty() ? "127.0.0.1" : met.place.addresses.front().text();
    auto client = std::make_shared<net::StoreClient>(own, found, met.secret, topology.rank,
                                                     Clock::now() + timeout);
    met.store = make_run_store(std::move(client), std::move(server), timeout);
    return found;
  } catch (const net::ConnectionError& error) {
    if (error.kind() == net::ConnectionError::Kind::taken) {
      std::throw_with_nested(ConfigError(
          concat("Port ", port,
                 " on this machine, where the processes were to meet, is taken by another "
                 "program. Choose "
                 "another one (MASTER_PORT, or --main_process_port of accelerate-cpp launch; 0 "
                 "there means any free one), or "
                 "end the program that holds it: an earlier run may still be going.")));
    }
    std::throw_with_nested(
        DistributedError(concat("Rank 0 could not open the store at ", where(met.host, port),
                                ", where the processes were to meet. Is MASTER_ADDR "
                                "a name of this machine?"),
                         kOperation, topology.rank));
  }
}

/// The other ranks: connects to rank 0's store.
void join_store(Rendezvous& met, int port, const Topology& topology, milliseconds timeout) {
  try {
    auto client = std::make_shared<net::StoreClient>(met.host, port, met.secret, topology.rank,
                                                     Clock::now() + timeout);
    met.store = make_run_store(std::move(client), nullptr, timeout);
  } catch (const net::ConnectionError& error) {
    if (error.kind() == net::ConnectionError::Kind::refused) {
      std::throw_with_nested(ConfigError(
          concat("Rank ", topology.rank, " was refused at ", where(met.host, port),
                 ", where the processes were to meet: another secret is expected there. Give all "
                 "processes of a run the same ACCELERATE_SECRET or ACCELERATE_SECRET_FILE; if "
                 "they have it, another run holds the port.")));
    }
    std::throw_with_nested(
        TimeoutError(concat("Rank ", topology.rank, " found no rank 0 at ", where(met.host, port),
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

/// Where rank 0 listens when it may choose, and the name under which the others find it.
void choose_place(Rendezvous& met, const Topology& topology) {
  met.host = one_machine(topology) ? "127.0.0.1" : net::host_name();
  try {
    met.place = net::place_of(met.host, one_machine(topology));
  } catch (const net::ConnectionError&) {
    // Others may have an address for a name that has none here: all interfaces.
  }
}

/// A file that nobody but its owner may read, for it holds the run's secret. Written aside and
/// renamed, so that nobody reads half of it.
void write_for_owner(const std::filesystem::path& file, const std::string& content) {
  const std::string aside = file.string() + concat(".", ::getpid());
  ::unlink(aside.c_str());
  const net::Descriptor out(::open(aside.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600));
  const bool written = out && ::write(out.number(), content.data(), content.size()) ==
                                  static_cast<ssize_t>(content.size());
  if (written && ::rename(aside.c_str(), file.c_str()) == 0) return;
  const int error = errno;
  ::unlink(aside.c_str());
  throw ConfigError(concat("The rendezvous file ", file.string(), " cannot be written (",
                           std::strerror(error),
                           "). ACCELERATE_RENDEZVOUS_FILE has to name a file in a folder that "
                           "every process sees and rank "
                           "0 may write to."));
}

/// Whether somebody else could have put the file there. What is not there, or no file, is nobody's.
bool belongs_to_another_user(const std::string& file) {
  struct stat status {};
  return ::stat(file.c_str(), &status) == 0 && status.st_uid != ::geteuid();
}

/// A pipe would be waited for, and a device replaced.
void refuse_what_is_no_file(const std::string& file) {
  struct stat status {};
  if (::stat(file.c_str(), &status) != 0 || S_ISREG(status.st_mode)) return;
  throw ConfigError(concat(
      "ACCELERATE_RENDEZVOUS_FILE names ", file, ", which is ",
      S_ISFIFO(status.st_mode)  ? "a named pipe"
      : S_ISDIR(status.st_mode) ? "a folder"
                                : "a device or socket",
      ". It has to name a file, or one that is not there yet, in a folder that every process "
      "sees and rank 0 may write to."));
}

/// Rank 0 opens the store at a free port and leaves its address and the secret in the file; the
/// others read it.
Rendezvous meet_by_file(const Topology& topology, milliseconds timeout) {
  const std::string& file = topology.rendezvous_file;
  refuse_what_is_no_file(file);
  Rendezvous met;
  if (topology.rank == 0) {
    choose_place(met, topology);
    met.secret = topology.secret.empty() ? net::draw_secret() : topology.secret;
    const int port = keep_store(met, 0, topology, timeout);
    // A secret that was given is not spread further.
    write_for_owner(file, concat(met.host, ' ', std::to_string(port), ' ',
                                 topology.secret.empty() ? met.secret : "given", '\n'));
    return met;
  }
  const auto deadline = Clock::now() + timeout;
  while (true) {
    int port = 0;
    std::string secret;
    if (std::ifstream in(file); in >> met.host >> port >> secret) {
      if (belongs_to_another_user(file)) {
        throw ConfigError(
            concat("The rendezvous file ", file,
                   " belongs to another user, who could lead this run astray with it. Remove it, "
                   "and name a file in a folder where only you can write."));
      }
      met.secret = topology.secret.empty() ? secret : topology.secret;
      try {
        // The file may be left over from an earlier run; so try for a short time, then read again.
        join_store(met, port, topology, std::min(left_until(deadline), milliseconds(2000)));
        return met;
      } catch (const Error&) {
        if (Clock::now() > deadline) throw;
      }
    }
    if (Clock::now() > deadline) {
      throw TimeoutError(
          concat("Rank ", topology.rank, " waited ", text::format_seconds(timeout.count() / 1e3),
                 " for rank 0 to write its address into ", file,
                 ". Was rank 0 started, and does it see the same file?"),
          kOperation, topology.rank);
    }
    std::this_thread::sleep_for(milliseconds(20));
  }
}

/// Rank 0 opens the store at a free port and tells the others over MPI, with the secret.
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
    choose_place(met, topology);
    int port = 0;
    try {
      met.secret = topology.secret.empty() ? net::draw_secret() : topology.secret;
      port = keep_store(met, 0, topology, timeout);
    } catch (...) {
      mpi_broadcast("");  // the others wait for it
      throw;
    }
    mpi_broadcast(concat(met.host, ' ', std::to_string(port), ' ', met.secret));
    return met;
  }
  std::istringstream address(mpi_broadcast(""));
  int port = 0;
  if (!(address >> met.host >> port >> met.secret)) {
    throw DistributedError(
        "Rank 0 could not open the store where the processes were to meet; see its output.",
        kOperation, topology.rank);
  }
  join_store(met, port, topology, timeout);
  return met;
}

/// MASTER_ADDR and MASTER_PORT: rank 0 keeps the store there.
Rendezvous meet_at_address(const Topology& topology, milliseconds timeout) {
  Rendezvous met;
  met.host = topology.master_addr;
  met.secret = topology.secret;
  std::string remark;
  try {
    met.place = net::place_of(met.host, one_machine(topology));
  } catch (const net::ConnectionError& error) {
    // The name may get its address any moment, as in a cluster that starts. Other machines can
    // come.
    remark = concat(" (", error.what(), ")");
  }
  if (met.secret.empty() && !met.place.loopback) {
    throw ConfigError(
        concat("The processes of this run are to meet at ",
               where(topology.master_addr, topology.master_port), remark,
               ", where other machines can come too, and they were given no secret by which they "
               "know each other. Give all of them one: in ACCELERATE_SECRET (such as what openssl "
               "rand -hex 32 writes), or in a file that ACCELERATE_SECRET_FILE names. If all "
               "processes are on one machine, MASTER_ADDR=127.0.0.1 needs none."));
  }
  if (topology.rank == 0) {
    keep_store(met, topology.master_port, topology, timeout);
  } else {
    join_store(met, topology.master_port, topology, timeout);
  }
  return met;
}

/// torchrun keeps the store, and lets in whoever comes. What the processes say to each other
/// directly is protected all the same.
Rendezvous meet_at_foreign_store(const Topology& topology, milliseconds timeout) {
  Rendezvous met;
  met.store = join_foreign_store(topology, timeout);
  // Rank 0 need not be on the machine of the store.
  if (topology.rank == 0) {
    choose_place(met, topology);
    const std::string own = net::address_toward(topology.master_addr);
    if (!met.place.loopback && !own.empty() && !net::resolve(own).front().loopback()) {
      met.host = own;
      met.place = net::place_of(own, false);
    }
    met.secret = topology.secret.empty() ? net::draw_secret() : topology.secret;
    log::warning(concat(
        "The processes of this run meet in torchrun's store at ",
        where(topology.master_addr, topology.master_port),
        ", which lets in everybody who can reach that port. In a network with strangers use "
        "accelerate-cpp launch, or set MASTER_ADDR, MASTER_PORT and ACCELERATE_SECRET by hand."));
  }
  return met;
}

/// What the others have to know and the store, which is not rank 0's, does not tell them.
void agree_in_foreign_store(Rendezvous& met, const Topology& topology) {
  if (topology.rank == 0) {
    met.store->set("rank0/host", met.host);
    met.store->set("rank0/secret", topology.secret.empty() ? met.secret : "given");
    return;
  }
  met.host = met.store->get_to_str("rank0/host");
  const std::string secret = met.store->get_to_str("rank0/secret");
  met.secret = topology.secret.empty() ? secret : topology.secret;
}

/// The address of this machine on the way to rank 0.
std::string find_interface(const Rendezvous& met, const Topology& topology) {
  try {
    const bool loopback = net::place_of(met.host, one_machine(topology)).loopback;
    if (loopback) return met.host.find(':') == std::string::npos ? "127.0.0.1" : "::1";
    std::string own = net::address_toward(met.host);
    // Other machines cannot come to a loopback address.
    if (own.empty() || net::resolve(own).front().loopback()) return {};
    return own;
  } catch (const net::ConnectionError&) {
    return {};
  }
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
    met = topology.launcher_has_store ? meet_at_foreign_store(topology, timeout)
                                      : meet_at_address(topology, timeout);
    place = where(topology.master_addr, topology.master_port);
  }
  // torchrun keeps one store for all attempts of a run; the prefix is this library's part of it.
  met.store =
      c10::make_intrusive<c10d::PrefixStore>(concat("accelerate/", topology.run_id), met.store);
  const auto spent = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
  try {
    wait_for_everyone(*met.store, topology, place, std::max(timeout - spent, milliseconds(1)));
    if (topology.launcher_has_store) agree_in_foreign_store(met, topology);
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
  met.interface = find_interface(met, topology);
  // Nobody needs the file any more, and the next run must not find it.
  if (topology.kind == LaunchKind::file && topology.rank == 0) {
    std::error_code ignored;  // a file that stays is overwritten by the next run
    std::filesystem::remove(topology.rendezvous_file, ignored);
  }
  return met;
}

}  // namespace accelerate::comm
