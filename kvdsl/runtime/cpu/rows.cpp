// One decoded token of many requests, each with its own cache: calls the policy's kernel once per request.
#include <kvdsl/args.hpp>

using kvdsl::DecodeArgs;

// caches: arguments of each cache. number, token [count]: a request's cache, and its token's row in the vectors, whose
// strides are in bytes. sinks: see DecodeArgs. supplied [count, supplied_stride]: see DecodeArgs, or null.
extern "C" int kvdsl_decode_rows(int (*decode)(const DecodeArgs*), const DecodeArgs* const* caches, const int64_t* number,
                                 const int64_t* token, int count,
                                 const char* query, const char* key, const char* value, char* out, const float* sinks,
                                 const float* supplied, int64_t supplied_stride,
                                 int64_t query_stride, int64_t key_stride, int64_t value_stride, int64_t out_stride, int threads) {
  int status = kvdsl::ok;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(| : status) if (threads > 1)
  for (int i = 0; i < count; ++i) {
    DecodeArgs args = *caches[number[i]];
    args.query = query + token[i] * query_stride;
    args.key = key + token[i] * key_stride;
    args.value = value + token[i] * value_stride;
    args.out = out + token[i] * out_stride;
    args.sinks = sinks;
    args.supplied = supplied ? supplied + i * supplied_stride : nullptr;
    status |= decode(&args);
  }
  return status;
}
