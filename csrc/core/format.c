/* The header of a codes file. Its claims are checked against the file's size before anything is allocated. */
#include "internal.h"
#include <string.h>

static const char magic[8] = "TQCODES";

/** table[k][b]: the effect of byte b on the sum if k more bytes follow it. 8 KiB on the stack: filling it takes as long
 *  as summing some 10 KiB, and needs no state shared by threads. */
static void fill_crc_table(uint32_t table[8][256])
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t sum = b;
        for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0xedb88320u : 0);
        table[0][b] = sum;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t b = 0; b < 256; b++) table[k][b] = table[k - 1][b] >> 8 ^ table[0][table[k - 1][b] & 255];
}

uint32_t tq_checksum(const void *data, size_t bytes)
{
    uint32_t table[8][256], sum = UINT32_MAX;
    const uint8_t *at = data;
    fill_crc_table(table);
    for (; bytes >= 8; bytes -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        word ^= sum;
        sum = 0;
        for (int k = 0; k < 8; k++) sum ^= table[7 - k][word >> 8 * k & 255];
    }
    for (; bytes; bytes--, at++) sum = sum >> 8 ^ table[0][(sum ^ *at) & 255];
    return ~sum;
}

static size_t header_bytes(uint32_t n_words) { return 8 + 4 + 4 + 8 * (size_t)n_words + 2 * 8 + 2 * 4; }

static void put(uint8_t **at, const void *from, size_t bytes)
{
    memcpy(*at, from, bytes);
    *at += bytes;
}

static void get(const uint8_t **at, void *to, size_t bytes)
{
    memcpy(to, *at, bytes);
    *at += bytes;
}

tq_status tq_file_header_write(const tq_file_header *header, uint8_t *data, size_t data_bytes, size_t *bytes_written,
                               tq_error *error)
{
    TQ_NEED(error, {"header", header, 0}, {"data", data, 0}, {"bytes_written", bytes_written, 0});
    tq_plan plan;
    if (header->n_words > TQ_PLAN_MAX_WORDS)
        return tq_fail(error, TQ_E_VALUE, "n_words", -1, header->n_words, "at most TQ_PLAN_MAX_WORDS");
    TQ_TRY(tq_plan_init(&plan, header->words, header->n_words, error));
    size_t bytes = header_bytes(header->n_words);
    if (data_bytes < bytes)
        return tq_fail(error, TQ_E_VALUE, "data_bytes", -1, (double)data_bytes, "room for the header");
    uint32_t version = TQ_FORMAT_VERSION;
    uint8_t *at = data;
    put(&at, magic, 8);
    put(&at, &version, 4);
    put(&at, &header->n_words, 4);
    put(&at, header->words, 8 * (size_t)header->n_words);
    put(&at, &header->vectors, 8);
    put(&at, &header->payload_bytes, 8);
    put(&at, &header->payload_checksum, 4);
    uint32_t checksum = tq_checksum(data, bytes - 4);
    put(&at, &checksum, 4);
    *bytes_written = bytes;
    return TQ_OK;
}

/** Checks that the payload is exactly the pages of this many vectors. */
static tq_status check_payload(const tq_plan *plan, const tq_file_header *h, size_t header_size, uint64_t file_bytes,
                               tq_error *error)
{
    uint64_t pages = h->vectors / (uint64_t)plan->page_tokens + (h->vectors % (uint64_t)plan->page_tokens != 0), wanted;
    if (__builtin_mul_overflow(pages, (uint64_t)plan->record_bytes, &wanted) || wanted != h->payload_bytes)
        return tq_fail(error, TQ_E_FORMAT, "payload_bytes", -1, (double)h->payload_bytes, "what the vectors fill");
    if (file_bytes - header_size != h->payload_bytes)
        return tq_fail(error, TQ_E_FORMAT, "file_bytes", -1, (double)file_bytes,
                       "the header's and the payload's bytes together");
    return TQ_OK;
}

tq_status tq_file_header_read(const uint8_t *data, size_t data_bytes, uint64_t file_bytes, tq_file_header *header,
                              size_t *header_size, tq_error *error)
{
    TQ_NEED(error, {"data", data, 0}, {"header", header, 0}, {"header_bytes", header_size, 0});
    if (data_bytes < 16 || file_bytes < data_bytes)
        return tq_fail(error, TQ_E_FORMAT, "file_bytes", -1, (double)file_bytes, "at least a header's");
    tq_file_header h = {0};
    uint32_t version;
    const uint8_t *at = data;
    if (memcmp(data, magic, 8))
        return tq_fail(error, TQ_E_FORMAT, "magic", -1, data[0], "that of a TurboQuant codes file");
    at += 8;
    get(&at, &version, 4);
    get(&at, &h.n_words, 4);
    if (version != TQ_FORMAT_VERSION) return tq_fail(error, TQ_E_FORMAT, "version", -1, version, "1");
    if (h.n_words > TQ_PLAN_MAX_WORDS) return tq_fail(error, TQ_E_FORMAT, "n_words", -1, h.n_words, "at most 273");
    size_t bytes = header_bytes(h.n_words);
    if (data_bytes < bytes)
        return tq_fail(error, TQ_E_FORMAT, "file_bytes", -1, (double)file_bytes, "at least its header's");
    get(&at, h.words, 8 * (size_t)h.n_words);
    get(&at, &h.vectors, 8);
    get(&at, &h.payload_bytes, 8);
    get(&at, &h.payload_checksum, 4);
    uint32_t checksum;
    get(&at, &checksum, 4);
    if (checksum != tq_checksum(data, bytes - 4))
        return tq_fail(error, TQ_E_FORMAT, "header", -1, checksum, "undamaged: its checksum differs");
    tq_plan plan;
    if (tq_plan_init(&plan, h.words, h.n_words, error) != TQ_OK) {
        if (error) error->status = TQ_E_FORMAT;
        return TQ_E_FORMAT;
    }
    TQ_TRY(check_payload(&plan, &h, bytes, file_bytes, error));
    *header = h;
    *header_size = bytes;
    return TQ_OK;
}
