#include "net/place.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>

namespace accelerate::net {

Place place_of(const std::string& host, bool one_machine) {
  const auto addresses = resolve(host);
  const auto means_loopback = [](const Address& address) { return address.loopback(); };
  const auto is_the_number = [&](const Address& address) { return address.text() == host; };
  if (std::all_of(addresses.begin(), addresses.end(), means_loopback)) {
    const bool everywhere_the_same =
        host == "localhost" || std::any_of(addresses.begin(), addresses.end(), is_the_number);
    if (everywhere_the_same || one_machine) return {addresses, true};
    return {};
  }
  Place place;
  for (const Address& address : addresses) {
    if (!address.loopback() && address.local()) place.addresses.push_back(address);
  }
  return place;
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "localhost";
  return name.data();
}

}  // namespace accelerate::net
