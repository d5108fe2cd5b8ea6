// The small operations of a layer and paged attention for processors: what ``kernels/`` is for GPUs.
//
// Plain C++ with OpenMP and GCC's vector types, without torch: ``library`` compiles it for the machine
// at hand and ``ops`` calls it with addresses. Sums, norms and softmax are computed in float32; what is
// stored is rounded once, but where the plain-torch twin (``reference``) rounds in between: in the norm.
// Attention is the online softmax of FlashAttention-2 (Dao 2023) over tiles of 64 keys.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef uint32_t BitLanes __attribute__((vector_size(64)));
typedef uint16_t HalfLanes __attribute__((vector_size(32)));

// As stored: the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

inline Lanes all(float value) { return Lanes{} + value; }

inline Lanes choose(IntLanes condition, Lanes yes, Lanes no) { return condition ? yes : no; }

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline Lanes load(const BFloat16* from) {
  HalfLanes half;
  std::memcpy(&half, from, sizeof half);
  return (Lanes)(__builtin_convertvector(half, BitLanes) << 16);
}

inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

// To nearest, ties to even; what is no number stays none.
inline HalfLanes round_bits(Lanes lanes) {
  BitLanes bits = (BitLanes)lanes;
  BitLanes rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  BitLanes nan = (BitLanes)((bits & 0x7fffffff) > 0x7f800000);
  return __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), HalfLanes);
}

inline void store(BFloat16* to, Lanes lanes) {
  HalfLanes half = round_bits(lanes);
  std::memcpy(to, &half, sizeof half);
}

// Fewer than LANES elements, the others 0.
template <class T>
inline Lanes load_some(const T* from, long count) {
  T padded[LANES] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <class T>
inline void store_some(T* to, Lanes lanes, long count) {
  T padded[LANES];
  store(padded, lanes);
  std::memcpy(to, padded, count * sizeof(T));
}

template <class T>
inline Lanes load_up_to(const T* from, long count) {
  return count >= LANES ? load(from) : load_some(from, count);
}

template <class T>
inline void store_up_to(T* to, Lanes lanes, long count) {
  if (count >= LANES)
    store(to, lanes);
  else
    store_some(to, lanes, count);
}

// As a value of type T would come back from memory.
template <class T>
inline Lanes rounded(Lanes lanes) {
  return lanes;
}
template <>
inline Lanes rounded<BFloat16>(Lanes lanes) {
  return (Lanes)(__builtin_convertvector(round_bits(lanes), BitLanes) << 16);
}

inline float sum(Lanes lanes) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += lanes[i];
  return total;
}

inline float largest(Lanes lanes) {
  float most = lanes[0];
  for (int i = 1; i < LANES; i++) most = std::max(most, lanes[i]);
  return most;
}

// 2^x: its whole part by the exponent's bits, the rest in [-1/2, 1/2] by Taylor's series of degree 6
// (relative error 2e-8). Below 2^-126 it is 0, above 2^127 infinite; what is no number stays none.
inline Lanes exp2(Lanes x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  Lanes bounded = choose(x < -126.0f, all(-126.0f), choose(x > 127.0f, all(127.0f), x));
  Lanes shifted = bounded + shift;
  Lanes rest = bounded - (shifted - shift);
  Lanes power = all(1.54035304e-4f);
  power = power * rest + 1.33335581e-3f;
  power = power * rest + 9.61812911e-3f;
  power = power * rest + 5.55041087e-2f;
  power = power * rest + 2.40226507e-1f;
  power = power * rest + 6.93147181e-1f;
  power = power * rest + 1.0f;
  IntLanes exponent = (IntLanes)shifted - (IntLanes)all(shift);
  Lanes result = (Lanes)((IntLanes)power + (exponent << 23));
  result = choose(x < -126.0f, all(0.0f), result);
  result = choose(x > 127.0f, all(std::numeric_limits<float>::infinity()), result);
  return choose(x == x, result, x);
}

constexpr float LOG2_E = 1.44269504f;
// Work below so many elements is done by one thread: waking another costs more.
constexpr long PARALLEL_ELEMENTS = 1 << 14;

// ---- RMS norm ----

template <class T>
void norm_row(T* out, T* total, const T* x, const T* residual, const T* weight, long size,
              float epsilon) {
  Lanes squares = {};
  for (long i = 0; i < size; i += LANES) {
    Lanes value = load_up_to(x + i, size - i);
    if (residual) {
      value = rounded<T>(value + load_up_to(residual + i, size - i));
      store_up_to(total + i, value, size - i);
    }
    squares += value * value;
  }
  const T* source = residual ? total : x;
  float factor = 1.0f / std::sqrt(sum(squares) / size + epsilon);
  for (long i = 0; i < size; i += LANES) {
    Lanes value = rounded<T>(load_up_to(source + i, size - i) * factor);
    store_up_to(out + i, value * load_up_to(weight + i, size - i), size - i);
  }
}

// x is [tokens, groups, size] with strides; out, total and residual are contiguous.
template <class T>
void rms_norm(T* out, T* total, const T* x, const T* residual, const T* weight, long tokens,
              long groups, long size, long token_stride, long group_stride, float epsilon) {
#pragma omp parallel for if (tokens * groups * size >= PARALLEL_ELEMENTS)
  for (long row = 0; row < tokens * groups; row++) {
    long at = row * size;
    norm_row(out + at, total ? total + at : nullptr,
             x + row / groups * token_stride + row % groups * group_stride,
             residual ? residual + at : nullptr, weight, size, epsilon);
  }
}

// ---- rotary embedding ----

template <class T>
void turn(T* out, const T* x, const T* cos, const T* sin, long half) {
  for (long i = 0; i < half; i += LANES) {
    long left = half - i;
    Lanes first = load_up_to(x + i, left), second = load_up_to(x + half + i, left);
    Lanes c = load_up_to(cos + i, left), s = load_up_to(sin + i, left);
    store_up_to(out + i, first * c - second * s, left);
    store_up_to(out + half + i, second * c + first * s, left);
  }
}

template <class T>
void rotary(T* query_out, T* key_out, const T* query, const T* key, const T* cos, const T* sin,
            long tokens, long heads, long kv_heads, long half, long query_token, long query_head,
            long key_token, long key_head) {
#pragma omp parallel for if (tokens * (heads + kv_heads) * half >= PARALLEL_ELEMENTS)
  for (long token = 0; token < tokens; token++) {
    const T *c = cos + token * half, *s = sin + token * half;
    for (long head = 0; head < heads; head++)
      turn(query_out + (token * heads + head) * 2 * half,
           query + token * query_token + head * query_head, c, s, half);
    for (long head = 0; head < kv_heads; head++)
      turn(key_out + (token * kv_heads + head) * 2 * half,
           key + token * key_token + head * key_head, c, s, half);
  }
}

// ---- gated activation ----

template <class T>
void silu_and_mul(T* out, const T* x, long tokens, long size, long stride) {
#pragma omp parallel for if (tokens * size >= PARALLEL_ELEMENTS)
  for (long token = 0; token < tokens; token++) {
    const T *gate = x + token * stride, *up = gate + size;
    for (long i = 0; i < size; i += LANES) {
      Lanes value = load_up_to(gate + i, size - i);
      Lanes activated = rounded<T>(value / (1.0f + exp2(-LOG2_E * value)));
      store_up_to(out + token * size + i, activated * load_up_to(up + i, size - i), size - i);
    }
  }
}

// ---- paged keys and values ----

// Where the keys and values of one layer are; see ``kv_cache``.
template <class T>
struct Pages {
  T* base;
  long layers, layer, blocks_per_segment, block_size, kv_heads, head_size;

  long row_elements() const { return block_size * kv_heads * head_size; }
  T* key(long block, long place, long kv_head) const {
    long segment = block / blocks_per_segment;
    long row = (segment * layers + layer) * 2 * blocks_per_segment + block % blocks_per_segment;
    return base + row * row_elements() + (place * kv_heads + kv_head) * head_size;
  }
  // From a key to its value.
  long to_value() const { return blocks_per_segment * row_elements(); }
};

template <class T>
void kv_write(const Pages<T>& pages, const T* key, const T* value, const int64_t* slots, long tokens,
              long key_token, long value_token) {
  long row = pages.kv_heads * pages.head_size;
#pragma omp parallel for if (tokens * row >= PARALLEL_ELEMENTS)
  for (long token = 0; token < tokens; token++) {
    long slot = slots[token];
    if (slot < 0) continue;  // the row belongs to nobody
    T* to = pages.key(slot / pages.block_size, slot % pages.block_size, 0);
    std::memcpy(to, key + token * key_token, row * sizeof(T));
    std::memcpy(to + pages.to_value(), value + token * value_token, row * sizeof(T));
  }
}

// ---- paged attention ----

// Where the processor multiplies pairs of bfloat16 into float32, matrices keep their type: neighbours
// along the summed dimension lie in one lane, and softmax weights are rounded before they are used.
template <class T>
constexpr bool PAIRED = false;
#if defined(__AVX512BF16__)
template <>
constexpr bool PAIRED<BFloat16> = true;
#endif

// sums + the products of what ``left`` and the lanes of ``right`` hold.
inline Lanes add_products(Lanes sums, float left, Lanes right) { return sums + left * right; }

#if defined(__AVX512BF16__)
inline Lanes add_products(Lanes sums, uint32_t left, Lanes right) {
  return (Lanes)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(left), (__m512bh)right);
}
#endif

constexpr int KEYS = 64;      // keys of a tile
constexpr int ROWS = 64;      // query rows of a tile: tokens x heads of one KV head
constexpr int ROWS_AT_ONCE = 4;
constexpr int KEY_VECTORS = KEYS / LANES;

inline void transpose(Lanes rows[LANES]) {
#define EXCHANGE(step)                                                                   \
  {                                                                                      \
    IntLanes low, high;                                                                  \
    for (int i = 0; i < LANES; i++) {                                                    \
      low[i] = i & step ? LANES + i - step : i;                                          \
      high[i] = i & step ? LANES + i : i + step;                                         \
    }                                                                                    \
    for (int i = 0; i < LANES; i++)                                                      \
      if (!(i & step)) {                                                                 \
        Lanes first = rows[i], second = rows[i + step];                                      \
        rows[i] = __builtin_shuffle(first, second, low);                                 \
        rows[i + step] = __builtin_shuffle(first, second, high);                         \
      }                                                                                  \
  }
  EXCHANGE(1) EXCHANGE(2) EXCHANGE(4) EXCHANGE(8)
#undef EXCHANGE
}

// Memory of one thread. An element of a matrix is a float32, or a pair where types are paired.
struct Scratch {
  std::vector<float> keys, values, queries, weights, outputs, scores;
  float most[ROWS], total[ROWS];

  void fit(long padded) {
    size_t size = static_cast<size_t>(padded) * KEYS;
    if (keys.size() >= size) return;
    for (auto* buffer : {&keys, &values, &queries, &outputs}) buffer->resize(size);
    for (auto* buffer : {&scores, &weights}) buffer->resize(ROWS * KEYS);
  }
};

struct Batch {
  const int32_t* tables;
  long table_stride;
  const int32_t* starts;
  const int32_t* contexts;
  long sequences, heads;
  long window;     // 0: none
  float scale;
  float soft_cap;  // 0: none
};

// Rows [row, row + ROWS) of one sequence and KV head: row r is query r / group, head r % group.
struct Task {
  long sequence, row, kv_head;
};

template <class T>
class Tile {
  static constexpr int PER_LANE = PAIRED<T> ? 2 : 1;
  using Element = std::conditional_t<PAIRED<T>, uint32_t, float>;

 public:
  static long pad(long size) {
    constexpr long unit = LANES * PER_LANE;
    return (size + unit - 1) / unit * unit;
  }

  Tile(const Pages<T>& pages, const Batch& batch, const Task& task, Scratch& scratch)
      : pages_(pages), batch_(batch), task_(task), scratch_(scratch) {
    group_ = batch.heads / pages.kv_heads;
    first_query_ = batch.starts[task.sequence];
    long queries = batch.starts[task.sequence + 1] - first_query_;
    before_ = batch.contexts[task.sequence] - queries;
    rows_ = std::min<long>(ROWS, queries * group_ - task.row);
    padded_rows_ = (rows_ + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE;
    size_ = pages.head_size;
    padded_ = pad(size_);
    depth_ = padded_ / PER_LANE;
  }

  void attend(T* out, const T* query, long query_token, long query_head) {
    read_queries(query, query_token, query_head);
    long first = before_ + task_.row / group_;
    long end = before_ + (task_.row + rows_ - 1) / group_ + 1;
    long start = batch_.window ? std::max<long>(0, first - batch_.window + 1) : 0;
    for (long key = start; key < end; key += KEYS) {
      read_keys(key, end);
      score();
      weigh(key, end);
      accumulate(std::min<long>(KEYS, end - key));
    }
    write(out);
  }

 private:
  long token(long row) const { return (task_.row + row) / group_; }
  long head(long row) const { return task_.kv_head * group_ + (task_.row + row) % group_; }

  // One element of a vector's worth of a stored row: as float32, or as it is.
  static Lanes read(const T* from, long count) {
    if constexpr (PAIRED<T>) {
      Lanes lanes = {};
      // A copy of a size that is known takes one instruction.
      if (count >= LANES * PER_LANE)
        std::memcpy(&lanes, from, sizeof lanes);
      else
        std::memcpy(&lanes, from, count * sizeof(T));
      return lanes;
    } else {
      return load_up_to(from, count);
    }
  }

  static Element element(const std::vector<float>& buffer, long at) {
    Element value;
    std::memcpy(&value, &buffer[at], sizeof value);
    return value;
  }

  // Queries as [rows, depth].
  void read_queries(const T* query, long query_token, long query_head) {
    std::fill_n(scratch_.queries.begin(), padded_rows_ * depth_, 0.0f);
    std::fill_n(scratch_.outputs.begin(), padded_rows_ * padded_, 0.0f);
    for (long row = 0; row < rows_; row++) {
      const T* from =
          query + (first_query_ + token(row)) * query_token + head(row) * query_head;
      for (long d = 0; d < depth_; d += LANES)
        store(&scratch_.queries[row * depth_ + d],
              read(from + d * PER_LANE, size_ - d * PER_LANE));
    }
    std::fill_n(scratch_.most, ROWS, -std::numeric_limits<float>::infinity());
    std::fill_n(scratch_.total, ROWS, 0.0f);
  }

  // Keys as [depth, KEYS], values as [KEYS / PER_LANE, head size]; behind the end the last is repeated.
  void read_keys(long start, long end) {
    const int32_t* table = batch_.tables + task_.sequence * batch_.table_stride;
    long block = start / pages_.block_size, place = start % pages_.block_size, left = end - start;
    const T* next = pages_.key(table[block], place, task_.kv_head);
    for (int vector = 0; vector < KEY_VECTORS; vector++) {
      const T* keys[LANES];
      for (int i = 0; i < LANES; i++) {
        keys[i] = next;
        if (--left <= 0) continue;
        next += pages_.kv_heads * size_;
        // Divisions take longer than the products of a key: once a block is enough.
        if (++place == pages_.block_size) {
          place = 0;
          next = pages_.key(table[++block], 0, task_.kv_head);
        }
      }
      for (long d = 0; d < depth_; d += LANES) {
        Lanes tile[LANES];
        for (int i = 0; i < LANES; i++)
          tile[i] = read(keys[i] + d * PER_LANE, size_ - d * PER_LANE);
        transpose(tile);
        for (int i = 0; i < LANES; i++)
          store(&scratch_.keys[(d + i) * KEYS + vector * LANES], tile[i]);
      }
      for (int i = 0; i < LANES; i += PER_LANE) {
        const T* value = keys[i] + pages_.to_value();
        float* to = &scratch_.values[(vector * LANES + i) / PER_LANE * padded_];
        for (long d = 0; d < size_; d += LANES) {
          Lanes lanes = load_up_to(value + d, size_ - d);
          if constexpr (PAIRED<T>) {
            BitLanes low = (BitLanes)lanes >> 16;
            lanes = (Lanes)((BitLanes)load_up_to(keys[i + 1] + pages_.to_value() + d, size_ - d) | low);
          }
          store(to + d, lanes);
        }
      }
    }
  }

  void score() {
    float factor = batch_.scale * (batch_.soft_cap ? 1.0f : LOG2_E);
    for (long row = 0; row < padded_rows_; row += ROWS_AT_ONCE) {
      Lanes scores[ROWS_AT_ONCE][KEY_VECTORS] = {};
      for (long d = 0; d < depth_; d++)
        for (int v = 0; v < KEY_VECTORS; v++) {
          Lanes key = load(&scratch_.keys[d * KEYS + v * LANES]);
          for (int r = 0; r < ROWS_AT_ONCE; r++)
            scores[r][v] =
                add_products(scores[r][v], element(scratch_.queries, (row + r) * depth_ + d), key);
        }
      for (int r = 0; r < ROWS_AT_ONCE; r++)
        for (int v = 0; v < KEY_VECTORS; v++)
          store(&scratch_.scores[(row + r) * KEYS + v * LANES], scores[r][v] * factor);
    }
  }

  // Scores become weights [rows, KEYS / PER_LANE]; what was summed before is scaled to the new maximum.
  void weigh(long start, long end) {
    const float none = -std::numeric_limits<float>::infinity();
    for (long row = 0; row < rows_; row++) {
      float* scores = &scratch_.scores[row * KEYS];
      long position = before_ + token(row);
      // The keys that this row sees, counted from the tile's first.
      long from = batch_.window ? std::max<long>(0, position - batch_.window + 1 - start) : 0;
      long to = std::min(position + 1, end) - start;
      if (batch_.soft_cap)
        for (int i = 0; i < KEYS; i++)
          scores[i] = LOG2_E * batch_.soft_cap * std::tanh(scores[i] / batch_.soft_cap);
      if (from > 0 || to < KEYS)
        for (int i = 0; i < KEYS; i++)
          if (i < from || i >= to) scores[i] = none;
      Lanes most = load(scores);
      for (int v = 1; v < KEY_VECTORS; v++) {
        Lanes other = load(scores + v * LANES);
        most = choose(other > most, other, most);
      }
      float peak = std::max(scratch_.most[row], largest(most));
      float* weights = &scratch_.weights[row * KEYS / PER_LANE];
      if (peak == none) {
        std::fill_n(weights, KEYS / PER_LANE, 0.0f);
        continue;
      }
      Lanes added = {};
      for (int v = 0; v < KEY_VECTORS; v++) {
        Lanes weight = exp2(load(scores + v * LANES) - peak);
        added += weight;
        if constexpr (PAIRED<T>)
          store(reinterpret_cast<T*>(weights) + v * LANES, weight);
        else
          store(weights + v * LANES, weight);
      }
      if (peak > scratch_.most[row]) {
        float shrink = std::exp2(scratch_.most[row] - peak);
        scratch_.total[row] *= shrink;
        float* output = &scratch_.outputs[row * padded_];
        for (long d = 0; d < padded_; d += LANES) store(output + d, load(output + d) * shrink);
        scratch_.most[row] = peak;
      }
      scratch_.total[row] += sum(added);
    }
    std::fill_n(scratch_.weights.begin() + rows_ * KEYS / PER_LANE,
                (padded_rows_ - rows_) * KEYS / PER_LANE, 0.0f);
  }

  template <int WIDTH>
  void accumulate_columns(long d, long keys) {
    for (long row = 0; row < padded_rows_; row += ROWS_AT_ONCE) {
      Lanes sums[ROWS_AT_ONCE][WIDTH];
      float* output = &scratch_.outputs[row * padded_ + d];
      for (int r = 0; r < ROWS_AT_ONCE; r++)
        for (int v = 0; v < WIDTH; v++) sums[r][v] = load(output + r * padded_ + v * LANES);
      for (long key = 0; key < keys; key++)
        for (int v = 0; v < WIDTH; v++) {
          Lanes value = load(&scratch_.values[key * padded_ + d + v * LANES]);
          for (int r = 0; r < ROWS_AT_ONCE; r++)
            sums[r][v] = add_products(
                sums[r][v], element(scratch_.weights, (row + r) * KEYS / PER_LANE + key), value);
        }
      for (int r = 0; r < ROWS_AT_ONCE; r++)
        for (int v = 0; v < WIDTH; v++) store(output + r * padded_ + v * LANES, sums[r][v]);
    }
  }

  void accumulate(long keys) {
    long pairs = (keys + PER_LANE - 1) / PER_LANE;
    long d = 0;
    for (; d + 4 * LANES <= padded_; d += 4 * LANES) accumulate_columns<4>(d, pairs);
    for (; d < padded_; d += LANES) accumulate_columns<1>(d, pairs);
  }

  void write(T* out) {
    for (long row = 0; row < rows_; row++) {
      T* to = out + ((first_query_ + token(row)) * batch_.heads + head(row)) * size_;
      // Nothing was seen where the context is empty: a row that belongs to nobody.
      float factor = scratch_.total[row] == 0.0f ? 0.0f : 1.0f / scratch_.total[row];
      for (long i = 0; i < size_; i += LANES)
        store_up_to(to + i, load(&scratch_.outputs[row * padded_ + i]) * factor, size_ - i);
    }
  }

  const Pages<T>& pages_;
  const Batch& batch_;
  const Task& task_;
  Scratch& scratch_;
  // ``depth_`` is the padded head size in elements.
  long group_, first_query_, before_, rows_, padded_rows_, size_, padded_, depth_;
};

template <class T>
void paged_attention(const Pages<T>& pages, const Batch& batch, T* out, const T* query,
                     long query_token, long query_head) {
  std::vector<Task> tasks;
  long group = batch.heads / pages.kv_heads;
  for (long sequence = 0; sequence < batch.sequences; sequence++) {
    long rows = (batch.starts[sequence + 1] - batch.starts[sequence]) * group;
    for (long row = 0; row < rows; row += ROWS)
      for (long kv_head = 0; kv_head < pages.kv_heads; kv_head++)
        tasks.push_back({sequence, row, kv_head});
  }
  long padded = Tile<T>::pad(pages.head_size);
#pragma omp parallel for schedule(dynamic)
  for (size_t i = 0; i < tasks.size(); i++) {
    static thread_local Scratch scratch;
    scratch.fit(padded);
    Tile<T>(pages, batch, tasks[i], scratch).attend(out, query, query_token, query_head);
  }
}

}  // namespace

#define EXPORT(NAME, T)                                                                          \
  extern "C" void rms_norm_##NAME(T* out, T* total, const T* x, const T* residual,               \
                                  const T* weight, long tokens, long groups, long size,          \
                                  long token_stride, long group_stride, float epsilon) {         \
    rms_norm(out, total, x, residual, weight, tokens, groups, size, token_stride, group_stride,  \
             epsilon);                                                                           \
  }                                                                                              \
  extern "C" void rotary_##NAME(T* query_out, T* key_out, const T* query, const T* key,          \
                                const T* cos, const T* sin, long tokens, long heads,             \
                                long kv_heads, long half, long query_token, long query_head,     \
                                long key_token, long key_head) {                                 \
    rotary(query_out, key_out, query, key, cos, sin, tokens, heads, kv_heads, half, query_token, \
           query_head, key_token, key_head);                                                     \
  }                                                                                              \
  extern "C" void silu_and_mul_##NAME(T* out, const T* x, long tokens, long size, long stride) { \
    silu_and_mul(out, x, tokens, size, stride);                                                  \
  }                                                                                              \
  extern "C" void kv_write_##NAME(T* base, const T* key, const T* value, const int64_t* slots,   \
                                  long tokens, long key_token, long value_token, long layers,    \
                                  long layer, long blocks_per_segment, long block_size,          \
                                  long kv_heads, long head_size) {                               \
    Pages<T> pages{base, layers, layer, blocks_per_segment, block_size, kv_heads, head_size};    \
    kv_write(pages, key, value, slots, tokens, key_token, value_token);                          \
  }                                                                                              \
  extern "C" void paged_attention_##NAME(                                                        \
      T* base, T* out, const T* query, const int32_t* tables, const int32_t* starts,             \
      const int32_t* contexts, long sequences, long heads, long table_stride, long query_token,  \
      long query_head, long window, float scale, float soft_cap, long layers, long layer,        \
      long blocks_per_segment, long block_size, long kv_heads, long head_size) {                 \
    Pages<T> pages{base, layers, layer, blocks_per_segment, block_size, kv_heads, head_size};    \
    Batch batch{tables, table_stride, starts, contexts, sequences, heads, window, scale,         \
                soft_cap};                                                                       \
    paged_attention(pages, batch, out, query, query_token, query_head);                          \
  }

EXPORT(float32, float)
EXPORT(bfloat16, BFloat16)
