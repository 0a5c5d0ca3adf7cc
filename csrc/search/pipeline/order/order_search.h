// Searches for orders on several threads.
#pragma once

#include <string>

#include "search/pipeline/order/explorer.h"

namespace mosaic::search::pipeline {

// Runs a method on each thread with numbers drawn of its own, and takes the best of all; of equal ones that of the
// first thread. So the same seed and number of threads give the same orders where roll-outs end the search, and
// whenever the clock does not. Throws std::invalid_argument, Interrupted.
FoundOrders find_orders(const Tasks& tasks, const std::string& method, const OrderLimits& limits);

}  // namespace mosaic::search::pipeline
