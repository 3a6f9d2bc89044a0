/* libFuzzer target: the header of a codes file. Whatever it accepts, it must write again, byte for byte. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <turboquant.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    /* The last two bytes say how much of a header's checksum to repair and how long the file claims to be. */
    if (bytes < 2) return 0;
    uint8_t repair = data[bytes - 1], claim = data[bytes - 2];
    bytes -= 2;
    uint8_t *file = malloc(bytes ? bytes : 1);
    memcpy(file, data, bytes);
    uint32_t n_words = 0;
    if (bytes >= 16) memcpy(&n_words, file + 12, 4);
    size_t header = 16 + 8 * (size_t)n_words + 24;
    if (repair % 2 && header <= bytes) { /* random bytes never pass a checksum: make it fit */
        uint32_t sum = tq_checksum(file, header - 4);
        memcpy(file + header - 4, &sum, 4);
    }
    tq_file_header read;
    tq_error error = {0};
    size_t read_bytes = 0;
    uint64_t file_bytes = repair % 4 < 2 ? bytes : bytes + claim * 8192u;
    if (repair % 8 == 7 && bytes >= header && header >= 40) { /* a payload that is as long as it says */
        uint64_t payload;
        memcpy(&payload, file + header - 16, 8);
        file_bytes = header + payload;
    }
    tq_status status = tq_file_header_read(file, bytes, file_bytes, &read, &read_bytes, &error);
    if (status == TQ_OK) {
        uint8_t again[TQ_FILE_HEADER_MAX_BYTES];
        size_t written = 0;
        if (tq_file_header_write(&read, again, sizeof again, &written, &error) != TQ_OK) abort();
        if (written != read_bytes || memcmp(again, file, written)) abort();
        if (read.payload_bytes > file_bytes) abort();
    } else if (!error.argument || !error.wants) {
        abort();
    }
    free(file);
    return 0;
}
