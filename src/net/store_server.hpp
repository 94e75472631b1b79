#pragma once

#include "net/gate.hpp"
#include "net/store_message.hpp"

#include <atomic>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace accelerate::net {

/// The keys and values by which the processes of a run agree, kept on a thread of its own and given
/// only to those who hold the run's secret. It has no LibTorch in it, so that a launcher can keep
/// one as well as rank 0.
class StoreServer {
 public:
  /// `expected` is how many processes will connect at the same time.
  StoreServer(std::vector<Descriptor> listening, const std::string& secret, int expected);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  int port() const noexcept { return gate_.port(); }

 private:
  struct Client {
    Descriptor socket;
    std::string received;
    std::string unsent;
    /// The connection took no more; nothing is read until it does.
    bool stuck = false;
    /// The get or wait that it waits for.
    std::optional<StoreMessage> waiting;
    std::size_t missing = 0;
    Clock::time_point deadline;
  };

  void run();
  void welcome();
  /// False when the client has gone or said what nobody of ours says.
  bool serve(Client& client, unsigned events);
  bool hear(Client& client);
  bool handle_requests(Client& client);
  void answer(Client& client, StoreMessage request);
  StoreMessage look_up(const StoreMessage& request) const;
  bool park(Client& client, const StoreMessage& request, Clock::time_point deadline);
  void put(const std::string& key, std::string value);
  void reply(Client& client, const StoreMessage& message);
  bool flush(Client& client);
  void finish_waits();
  void expire();
  void remove(std::map<int, Client>::iterator client);
  void unpark(int number, const Client& client);

  Gate gate_;
  Descriptor events_;
  Descriptor stop_;
  std::unordered_map<std::string, std::string> values_;
  std::map<int, Client> clients_;  // by descriptor
  /// Who waits for a key that is not there, by descriptor.
  std::unordered_map<std::string, std::vector<int>> awaited_;
  std::vector<int> answered_;  // those whose wait has ended in this round
  Clock::time_point next_deadline_ = Clock::time_point::max();
  std::thread thread_;
};

}  // namespace accelerate::net
