/* Headers of codes files. Owns the buffers it asks Python for. */
#include "binding.h"

static int get_bytes(const char *op, PyObject *object, Py_buffer *buffer)
{
    if (PyObject_GetBuffer(object, buffer, PyBUF_SIMPLE) == 0) return 0;
    PyErr_Clear();
    raise_type(op, "data", "bytes, or an object with one contiguous buffer", object);
    return -1;
}

const char doc_file_header_write[] =
    PyDoc_STR("file_header_write(plan, vectors, payload_bytes, payload_checksum)\n--\n\n"
              "The header of a codes file, as bytes; the payload, which are the pages, follows it.");
PyObject *py_file_header_write(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"plan", "vectors", "payload_bytes", "payload_checksum", NULL};
    PyObject *plan_object, *objects[3];
    read_plan_result read;
    tq_file_header header;
    uint8_t data[TQ_FILE_HEADER_MAX_BYTES];
    uint64_t checksum, *const numbers[3] = {&header.vectors, &header.payload_bytes, &checksum};
    size_t written = 0;
    const char *op = "file_header_write";
    (void)module;
    memset(&header, 0, sizeof header);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO:file_header_write", names, &plan_object, &objects[0],
                                     &objects[1], &objects[2]))
        return NULL;
    if (read_plan(op, plan_object, &read) < 0) return NULL;
    for (int i = 0; i < 3; i++)
        if (read_u64(op, names[i + 1], objects[i], numbers[i]) < 0) return NULL;
    if (checksum > UINT32_MAX) return raise_value(op, "payload_checksum", "in 0..2**32 - 1, got one outside");
    header.payload_checksum = (uint32_t)checksum;
    memcpy(header.words, read.words, read.n_words * sizeof *read.words);
    header.n_words = (uint32_t)read.n_words;
    tq_error error = {0};
    tq_status status = tq_file_header_write(&header, data, sizeof data, &written, &error);
    if (status != TQ_OK) return raise_status(op, status, &error, NULL);
    return PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)written);
}

static PyObject *words_tuple(const tq_file_header *header)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)header->n_words);
    if (!tuple) return NULL;
    for (uint32_t i = 0; i < header->n_words; i++) {
        PyObject *number = PyLong_FromLongLong(header->words[i]);
        if (!number) {
            Py_DECREF(tuple);
            return NULL;
        }
        PyTuple_SetItem(tuple, (Py_ssize_t)i, number);
    }
    return tuple;
}

const char doc_file_header_read[] = PyDoc_STR(
    "file_header_read(data, file_bytes)\n--\n\n"
    "What the header of a codes file says, as a dict, from the first bytes of a file of file_bytes bytes; "
    "FILE_HEADER_MAX_BYTES of them\nare always enough. ValueError if it is damaged, foreign, of another version, "
    "or claims more than file_bytes. The payload's checksum\n(zlib.crc32) is the caller's to compare.");
PyObject *py_file_header_read(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"data", "file_bytes", NULL};
    PyObject *data_object, *size_object, *plan;
    Py_buffer buffer;
    uint64_t file_bytes;
    tq_file_header header;
    size_t header_bytes = 0;
    const char *op = "file_header_read";
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:file_header_read", names, &data_object, &size_object))
        return NULL;
    if (read_u64(op, "file_bytes", size_object, &file_bytes) < 0 || get_bytes(op, data_object, &buffer) < 0)
        return NULL;
    tq_error error = {0};
    tq_status status = tq_file_header_read(buffer.buf, (size_t)buffer.len, file_bytes, &header, &header_bytes, &error);
    PyBuffer_Release(&buffer);
    if (status != TQ_OK) return raise_status(op, status, &error, NULL);
    plan = words_tuple(&header);
    if (!plan) return NULL;
    return Py_BuildValue("{s:N,s:K,s:K,s:I,s:n}", "plan", plan, "vectors", (unsigned long long)header.vectors,
                         "payload_bytes", (unsigned long long)header.payload_bytes, "payload_checksum",
                         (unsigned int)header.payload_checksum, "header_bytes", (Py_ssize_t)header_bytes);
}
