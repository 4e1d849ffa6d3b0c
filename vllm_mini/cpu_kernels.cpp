// The steps of a bfloat16 Llama that dominate its time on a CPU: matrix products, attention over pages, small operations.
//
// All sums are in float32 and every result is rounded to bfloat16 once, where PyTorch rounds. The sum behind one number
// is taken in one fixed order, whatever else is in the batch: a row computed alone, in a batch or in a longer chunk has
// the same bits. Everything rests on one micro-kernel, `tile`, which keeps R rows x 2 vectors of sums in registers
// (Goto and van de Geijn 2008) and reads its right-hand side as a "panel": for each pair of consecutive inputs, two
// vectors of 32-bit words that hold both inputs of one column. Where the CPU multiplies such pairs (AVX512-BF16), a word
// is used as it is; elsewhere it is widened to two floats on the way. Called through ctypes by cpu_kernels.py.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, MAX_ROWS = 12;  // lanes of a vector; rows whose sums fit into the registers
#elif defined(__AVX2__)
constexpr int W = 8, MAX_ROWS = 6;
#else
constexpr int W = 4, MAX_ROWS = 12;
#endif
constexpr int COLUMNS = 2 * W;      // of a panel
constexpr int CHUNK = 64;           // keys that attention takes at a time
constexpr int SPLIT = 4 * CHUNK;    // keys after which its running sums start afresh, so that cores can share a sequence
constexpr float LOWEST = -1e30f;    // of a score: finite, because the difference of two infinities is not a number

typedef float Floats __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t Word __attribute__((may_alias));
typedef uint16_t Bf16;

float widen(Bf16 bits) {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

Bf16 narrow(float value) {  // to nearest, ties to even; what is not a number stays so
    uint32_t word;
    std::memcpy(&word, &value, 4);
    return (word + 0x7fff + ((word >> 16) & 1)) >> 16;
}

Words narrow(Floats even, Floats odd) {  // two columns in a word
    Words low = (Words)even, high = (Words)odd;
    return ((low + 0x7fff + ((low >> 16) & 1)) >> 16) | ((high + 0x7fff + ((high >> 16) & 1)) & 0xffff0000u);
}

float exp2_fast(float x) {  // relative error under 2e-7; 0 below 2^-126
    float bounded = x > 127.f ? 127.f : x;
    float whole = float(int32_t(bounded + (bounded < 0 ? -0.5f : 0.5f))), part = bounded - whole;
    float power = 1.f + part * (0.693147182f + part * (0.240226462f + part * (0.0555032724f + part * (
        0.00961812939f + part * (0.00133981102f + part * 0.000154697872f)))));
    uint32_t bits = uint32_t(int32_t(whole) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return x < -126.f ? 0.f : power * scale;
}

#ifdef __AVX512BF16__
typedef uint16_t Input;  // a left-hand side as `tile` reads it
Input to_input(float value) { return narrow(value); }
#else
typedef float Input;
Input to_input(float value) { return widen(narrow(value)); }
#endif

// out[R][2] (+)= rows of inputs, `stride` apart, times a panel of `pairs` pairs.
template <int R>
void tile(const Input* rows, long stride, const Words* panel, int pairs, Floats* out, bool accumulate) {
    Floats sum[R][2];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 2; ++v) sum[r][v] = accumulate ? out[2 * r + v] : Floats{};
    for (int p = 0; p < pairs; ++p) {
        Words left = panel[2 * p], right = panel[2 * p + 1];
        if (R <= 4) __builtin_prefetch((const char*)(panel + 2 * p) + 1024);
#ifdef __AVX512BF16__
        for (int r = 0; r < R; ++r) {
            __m512bh both = (__m512bh)_mm512_set1_epi32(*(const Word*)(rows + r * stride + 2 * p));
            sum[r][0] = (Floats)_mm512_dpbf16_ps((__m512)sum[r][0], both, (__m512bh)left);
            sum[r][1] = (Floats)_mm512_dpbf16_ps((__m512)sum[r][1], both, (__m512bh)right);
        }
#else
        for (int r = 0; r < R; ++r) {
            sum[r][0] += rows[r * stride + 2 * p] * (Floats)(left << 16);
            sum[r][1] += rows[r * stride + 2 * p] * (Floats)(right << 16);
        }
        for (int r = 0; r < R; ++r) {
            sum[r][0] += rows[r * stride + 2 * p + 1] * (Floats)(left & 0xffff0000u);
            sum[r][1] += rows[r * stride + 2 * p + 1] * (Floats)(right & 0xffff0000u);
        }
#endif
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 2; ++v) out[2 * r + v] = sum[r][v];
}

typedef void (*Tile)(const Input*, long, const Words*, int, Floats*, bool);
const Tile TILES[] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>,
#if !defined(__AVX2__) || defined(__AVX512F__)
                      tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>,
#endif
};

// As few tiles as the registers allow, of equal size as nearly as can be: calls body(first row, number of rows).
template <class Body>
void for_each_tile(int num_rows, Body body) {
    int num_tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int i = 0, row = 0; i < num_tiles; ++i) {
        int count = (num_rows - row) / (num_tiles - i);
        body(row, count);
        row += count;
    }
}

void to_inputs(const Bf16* from, long count, Input* to) {
#pragma omp simd
    for (long i = 0; i < count; ++i) to[i] = to_input(widen(from[i]));
}

struct Pool {  // one layer's K or V: [num_blocks, block_size, num_kv_heads, head_dim]
    Bf16* data;
    long block_size, token_stride;
    Bf16* at(const int64_t* table, long position) const {
        return data + (table[position / block_size] * block_size + position % block_size) * token_stride;
    }
};

// Keys [first, first + CHUNK) as panels [CHUNK / COLUMNS][head_dim / 2][2][W]: a transposition of 32-bit words.
void pack_keys(Pool keys, const int64_t* table, long first, long end, int head_dim, Words* panels) {
    Words interleave_low, interleave_high;
    for (int i = 0; i < W; ++i) {
        interleave_low[i] = i / 2 + (i % 2) * W;
        interleave_high[i] = i / 2 + (i % 2) * W + W / 2;
    }
    for (int group = 0; group < CHUNK / W; ++group) {
        long position = first + group * W;
        const Bf16* start = position < end ? keys.at(table, position) : nullptr;  // W keys never straddle two blocks
        for (int word = 0; word < head_dim / 2; word += W) {
            Words now[W] = {}, next[W];
            for (int i = 0; i < W && start; ++i) now[i] = *(const Words*)(start + i * keys.token_stride + 2 * word);
            for (int step = 1; step < W; step *= 2) {  // each step is half of a perfect shuffle
                for (int i = 0; i < W / 2; ++i) {
                    next[2 * i] = __builtin_shuffle(now[i], now[i + W / 2], interleave_low);
                    next[2 * i + 1] = __builtin_shuffle(now[i], now[i + W / 2], interleave_high);
                }
                std::memcpy(now, next, sizeof now);
            }
            Words* panel = panels + (group / 2) * head_dim + group % 2;
            for (int i = 0; i < W; ++i) panel[2 * (word + i)] = now[i];
        }
    }
}

// Values of the same keys as panels [head_dim / COLUMNS][CHUNK / 2][2 (even, odd columns)][W]; zero from `end` on.
void pack_values(Pool values, const int64_t* table, long first, long end, int head_dim, Words* panels) {
    for (int pair = 0; pair < CHUNK / 2; ++pair) {
        long position = first + 2 * pair;
        const Bf16* row = position < end ? values.at(table, position) : nullptr;
        for (int panel = 0; panel < head_dim / COLUMNS; ++panel) {
            Words a = {}, b = {};
            if (row) a = *(const Words*)(row + panel * COLUMNS);
            if (position + 1 < end) b = *(const Words*)(row + values.token_stride + panel * COLUMNS);
            panels[(panel * CHUNK / 2 + pair) * 2] = (a & 0xffff) | (b << 16);
            panels[(panel * CHUNK / 2 + pair) * 2 + 1] = (a >> 16) | (b & 0xffff0000u);
        }
    }
}

// Softmax-weighted sums of some rows over some keys, not yet divided (Milakov and Gimelshein 2018): for each row the
// largest score, the sum of weights, and head_dim sums of values as [head_dim / COLUMNS][rows][2][W].
struct Sums {
    float *largest, *weight, *value;
    static long size(long rows, int head_dim) { return rows * (2 + head_dim); }
    Sums(float* memory, long rows) : largest(memory), weight(memory + rows), value(memory + 2 * rows) {}
    void clear(long rows, int head_dim) {
        std::fill(largest, largest + rows, LOWEST);
        std::fill(weight, weight + rows * (1 + head_dim), 0.f);
    }
    void merge(const Sums& other, long rows, int head_dim) {
        for (long row = 0; row < rows; ++row) {
            float top = std::max(largest[row], other.largest[row]);
            float keep = exp2_fast(largest[row] - top), add = exp2_fast(other.largest[row] - top);
            largest[row] = top;
            weight[row] = weight[row] * keep + other.weight[row] * add;
            for (int panel = 0; panel < head_dim / COLUMNS; ++panel)
                for (int i = 0; i < COLUMNS; ++i) {
                    long at = (panel * rows + row) * COLUMNS + i;
                    value[at] = value[at] * keep + other.value[at] * add;
                }
        }
    }
};

struct Unit {  // consecutive tokens of one sequence and some of their keys; `partial` >= 0: the sums go there, unmerged
    int64_t seq, first_token, num_tokens, first_position, first_key, end_key, partial;
};
struct Merge { int64_t token, first_partial, num_partials; };
struct Problem {  // filled by cpu_kernels.py, field by field
    const Bf16 *query, *key, *value;
    Bf16 *k_cache, *v_cache, *out;
    const int64_t *slots, *tables;
    const Unit* units;
    const Merge* merges;
    float* partials;
    int64_t num_tokens, query_stride, key_stride, value_stride, num_kv_heads, group, head_dim, block_size, table_stride,
        num_units, num_merges, num_threads;
    float scale;  // of a score, times log2(e)

    void write(const Sums& sums, long rows, long first_token, long head) const {
        for (long row = 0; row < rows; ++row) {
            Bf16* to = out + ((first_token + row / group) * num_kv_heads * group + head * group + row % group) * head_dim;
            for (int panel = 0; panel < head_dim / COLUMNS; ++panel) {
                const Floats* from = (const Floats*)(sums.value + (panel * rows + row) * COLUMNS);
                *(Words*)(to + panel * COLUMNS) = narrow(from[0] / sums.weight[row], from[1] / sums.weight[row]);
            }
        }
    }
};

// One chunk of scores of one row, in [CHUNK / COLUMNS][..][COLUMNS] `apart`, to weights that `tile` can read.
void weigh(const float* scores, long apart, long num_visible, float scale, float& largest, float& weight, float& keep,
           Input* weights) {
    float scaled[CHUNK], top = largest, total = 0;
    for (int panel = 0; panel < CHUNK / COLUMNS; ++panel)
#pragma omp simd
        for (int i = 0; i < COLUMNS; ++i)
            scaled[panel * COLUMNS + i] = panel * COLUMNS + i < num_visible ? scores[panel * apart + i] * scale : LOWEST;
#pragma omp simd reduction(max : top)
    for (int i = 0; i < CHUNK; ++i) top = scaled[i] > top ? scaled[i] : top;
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < CHUNK; ++i) {
        float power = exp2_fast(scaled[i] - top);
        weights[i] = to_input(power);
        total += power;
    }
    keep = exp2_fast(largest - top);
    weight = weight * keep + total;
    largest = top;
}

void attend(const Problem& p, const Unit& unit, long head, std::vector<float>& memory) {
    const int head_dim = p.head_dim, rows = unit.num_tokens * p.group;
    const long state = Sums::size(rows, head_dim), panel_size = CHUNK / 2 * head_dim;
    memory.resize(std::max<size_t>(memory.size(), 2 * state + rows * head_dim + 2 * panel_size + 2 * MAX_ROWS * CHUNK));
    Sums total(memory.data(), rows), sums(memory.data() + state, rows);
    Input* queries = (Input*)(memory.data() + 2 * state);
    Words* k_panels = (Words*)(memory.data() + 2 * state + rows * head_dim);
    Words* v_panels = k_panels + panel_size / W;
    float* scores = (float*)(v_panels + panel_size / W);
    Input* weights = (Input*)(scores + MAX_ROWS * CHUNK);
    const int64_t* table = p.tables + unit.seq * p.table_stride;
    const long token_stride = p.num_kv_heads * head_dim;
    Pool keys{p.k_cache + head * head_dim, p.block_size, token_stride};
    Pool values{p.v_cache + head * head_dim, p.block_size, token_stride};
    for (int row = 0; row < rows; ++row)
        to_inputs(p.query + (unit.first_token + row / p.group) * p.query_stride + (head * p.group + row % p.group) * head_dim,
                  head_dim, queries + long(row) * head_dim);
    total.clear(rows, head_dim);
    for (long key = unit.first_key; key < unit.end_key; key += CHUNK) {
        if ((key - unit.first_key) % SPLIT == 0) sums.clear(rows, head_dim);
        pack_keys(keys, table, key, unit.end_key, head_dim, k_panels);
        pack_values(values, table, key, unit.end_key, head_dim, v_panels);
        for_each_tile(rows, [&](int first, int count) {
            if (unit.first_position + (first + count - 1) / p.group < key) return;  // sees none of these keys
            for (int panel = 0; panel < CHUNK / COLUMNS; ++panel)
                TILES[count](queries + long(first) * head_dim, head_dim, k_panels + panel * head_dim, head_dim / 2,
                             (Floats*)(scores + panel * count * COLUMNS), false);
            for (int r = 0; r < count; ++r) {
                float keep;
                weigh(scores + r * COLUMNS, count * COLUMNS, unit.first_position + (first + r) / p.group + 1 - key, p.scale,
                      sums.largest[first + r], sums.weight[first + r], keep, weights + r * CHUNK);
                for (int panel = 0; panel < head_dim / COLUMNS; ++panel)
                    for (int v = 0; v < 2; ++v) ((Floats*)sums.value)[(panel * rows + first + r) * 2 + v] *= keep;
            }
            for (int panel = 0; panel < head_dim / COLUMNS; ++panel)
                TILES[count](weights, CHUNK, v_panels + panel * CHUNK, CHUNK / 2,
                             (Floats*)sums.value + (panel * rows + first) * 2, true);
        });
        bool last = key + CHUNK >= unit.end_key;
        if (last || (key + CHUNK - unit.first_key) % SPLIT == 0) total.merge(sums, rows, head_dim);
    }
    if (unit.partial < 0) return p.write(total, rows, unit.first_token, head);
    std::memcpy(p.partials + (unit.partial * p.num_kv_heads + head) * state, total.largest, state * sizeof(float));
}

}  // namespace

extern "C" {

int vector_lanes() { return W; }
int split_keys() { return SPLIT; }

// out [num_rows, num_columns] = x [num_rows, num_inputs] times packed panels, plus the bias unless there is none.
void linear(const Bf16* x, long num_rows, long num_inputs, const Words* weight, long num_columns, const Bf16* bias, Bf16* out,
            int num_threads) {
    const long num_panels = (num_columns + COLUMNS - 1) / COLUMNS, max_rows = 8 * MAX_ROWS;
    const long num_chunks = (num_rows + max_rows - 1) / max_rows, chunk_rows = (num_rows + num_chunks - 1) / num_chunks;
    static thread_local std::vector<Input> memory;
    memory.resize(std::max<size_t>(memory.size(), num_rows * num_inputs));
    Input* inputs = memory.data();
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static)
        for (long row = 0; row < num_rows; ++row) to_inputs(x + row * num_inputs, num_inputs, inputs + row * num_inputs);
#pragma omp for collapse(2) schedule(static)
        for (long chunk = 0; chunk < num_chunks; ++chunk)
            for (long panel = 0; panel < num_panels; ++panel) {
                const long start = chunk * chunk_rows, column = panel * COLUMNS;
                const int count_here = std::min<long>(COLUMNS, num_columns - column);
                Floats added[2] = {};
                for (int i = 0; i < count_here && bias; ++i) added[i % 2][i / 2] = widen(bias[column + i]);
                for_each_tile(std::min(chunk_rows, num_rows - start), [&](int first, int count) {
                    Floats sums[MAX_ROWS][2];
                    TILES[count](inputs + (start + first) * num_inputs, num_inputs, weight + panel * num_inputs,
                                 num_inputs / 2, sums[0], false);
                    for (int r = 0; r < count; ++r) {
                        Words words = narrow(sums[r][0] + added[0], sums[r][1] + added[1]);
                        std::memcpy(out + (start + first + r) * num_columns + column, &words, 2 * count_here);
                    }
                });
            }
    }
}

// Stores K and V of all tokens, then attends: units first, then what they left unmerged.
void paged_attention(const Problem* problem) {
    const Problem& p = *problem;
    const long token_size = p.num_kv_heads * p.head_dim;
#pragma omp parallel num_threads(p.num_threads)
    {
        static thread_local std::vector<float> memory;
#pragma omp for schedule(static)
        for (long token = 0; token < p.num_tokens; ++token) {
            std::memcpy(p.k_cache + p.slots[token] * token_size, p.key + token * p.key_stride, 2 * token_size);
            std::memcpy(p.v_cache + p.slots[token] * token_size, p.value + token * p.value_stride, 2 * token_size);
        }
#pragma omp for schedule(dynamic)
        for (long i = 0; i < p.num_units * p.num_kv_heads; ++i)
            attend(p, p.units[i / p.num_kv_heads], i % p.num_kv_heads, memory);
#pragma omp for schedule(static)
        for (long i = 0; i < p.num_merges * p.num_kv_heads; ++i) {
            const Merge& merge = p.merges[i / p.num_kv_heads];
            const long head = i % p.num_kv_heads, state = Sums::size(p.group, p.head_dim);
            memory.resize(std::max<size_t>(memory.size(), state));
            Sums total(memory.data(), p.group);
            total.clear(p.group, p.head_dim);
            for (long part = merge.first_partial; part < merge.first_partial + merge.num_partials; ++part)
                total.merge(Sums(p.partials + (part * p.num_kv_heads + head) * state, p.group), p.group, p.head_dim);
            p.write(total, p.group, merge.token, head);
        }
    }
}

// out = weight * x / sqrt(mean(x^2) + eps), rounded before the weight is applied; rows of `size`.
void rms_norm(const Bf16* x, const Bf16* weight, float eps, long num_rows, long size, Bf16* out, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows > 16)
    for (long row = 0; row < num_rows; ++row) {
        const Bf16* from = x + row * size;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (long i = 0; i < size; ++i) squares += widen(from[i]) * widen(from[i]);
        const float factor = 1.f / __builtin_sqrtf(squares / size + eps);
#pragma omp simd
        for (long i = 0; i < size; ++i) out[row * size + i] = narrow(widen(weight[i]) * widen(narrow(widen(from[i]) * factor)));
    }
}

// In place on [num_tokens, num_heads, head_dim], `stride` between tokens; cos and sin [num_tokens, head_dim].
void rotary(Bf16* x, long stride, long num_tokens, long num_heads, long head_dim, const Bf16* cos, const Bf16* sin,
            int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_tokens > 16)
    for (long token = 0; token < num_tokens; ++token)
        for (long head = 0; head < num_heads; ++head) {
            Bf16 *first = x + token * stride + head * head_dim, *second = first + head_dim / 2;
            const Bf16 *c = cos + token * head_dim, *s = sin + token * head_dim;
#pragma omp simd
            for (long i = 0; i < head_dim / 2; ++i) {
                const float a = widen(first[i]), b = widen(second[i]);
                first[i] = narrow(widen(narrow(a * widen(c[i]))) + widen(narrow(-b * widen(s[i]))));
                second[i] = narrow(widen(narrow(b * widen(c[i]))) + widen(narrow(a * widen(s[i]))));
            }
        }
}

// out [num_rows, size] = silu(gate) * up, both halves of a row of gate_up [num_rows, 2 * size].
void silu_and_mul(const Bf16* gate_up, long num_rows, long size, Bf16* out, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows > 4)
    for (long row = 0; row < num_rows; ++row) {
        const Bf16 *gate = gate_up + row * 2 * size, *up = gate + size;
#pragma omp simd
        for (long i = 0; i < size; ++i) {
            const float x = widen(gate[i]);
            out[row * size + i] = narrow(widen(narrow(x / (1.f + exp2_fast(x * -1.44269504f)))) * widen(up[i]));
        }
    }
}
}
